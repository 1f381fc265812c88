"""What the loader's tests share: meshes, rows, the expected order, and a source that counts."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np

from ptrainx.data import Permutation
from ptrainx.mesh import device_get, make_mesh

N = 37
ROWS = np.arange(N)[:, None] * 100 + np.arange(4)  # row i holds 100 i ... 100 i + 3


def two():
    return make_mesh(data=2, simulate=True)


def order(epoch, seed=0, n=N):
    return Permutation(n, seed, epoch)(np.arange(n))


def values(batches):
    return [device_get(batch).tolist() for batch in batches]


class Counting:
    """A source that notes which samples are read, by which thread."""

    def __init__(self, fail_at=None):
        self.reads, self.threads, self.fail_at = Counter(), set(), fail_at

    def __len__(self):
        return N

    def __getitem__(self, index):
        self.reads[index] += 1
        self.threads.add(threading.current_thread().name)
        if index == self.fail_at:
            raise OSError("the disk is gone")
        return ROWS[index]
