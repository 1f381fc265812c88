"""Saves from one random mesh, restores onto another, many times: uneven and empty shards, any specs, bit for bit.

python -m tests.checkpoint.pairs 200
"""

from __future__ import annotations

import random
import sys
import tempfile

import torch

import ptrainx as px
from ptrainx import P
from ptrainx.checkpoint import restore, save
from tests.checkpoint.cases import assert_same, random_bytes

__all__ = ["run"]

SIZES = [{"a": 1}, {"a": 2}, {"a": 3}, {"a": 5}, {"a": 2, "b": 2}, {"a": 3, "b": 2}, {"a": 2, "b": 2, "c": 2}]
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.complex64, torch.bool, torch.float8_e5m2]


def random_spec(shape: tuple[int, ...], sizes: dict[str, int], rng: random.Random) -> P:
    """Each axis splits some dim or none; where two split one, the first divides it."""
    entries: list[list[str]] = [[] for _ in shape]
    left = list(shape)
    for axis, n in sizes.items():
        dims = [d for d in range(len(shape)) if not entries[d] or left[d] >= 0]
        dim = rng.choice([None, *dims])
        if dim is None or left[dim] < 0:
            continue
        entries[dim].append(axis)
        left[dim] = left[dim] // n if left[dim] % n == 0 else -1  # cut unevenly: no further axis
    return P(*(tuple(entry) for entry in entries))


def run(times: int, seed: int = 0) -> int:
    """So many pairs; returns how many."""
    rng = random.Random(seed)
    uneven = 0
    for number in range(times):
        shapes = [tuple(rng.choice([0, 1, 2, 3, 4, 6, 8, 12]) for _ in range(rng.randrange(1, 4))) for _ in range(3)]
        tree = [random_bytes(*shape, dtype=rng.choice(DTYPES), seed=number) for shape in shapes]
        before, after = rng.choice(SIZES), rng.choice(SIZES)
        meshes = [px.make_mesh(sizes, simulate=True) for sizes in (before, after)]
        specs = [[random_spec(shape, sizes, rng) for shape in shapes] for sizes in (before, after)]
        with tempfile.TemporaryDirectory() as folder:
            placed = px.device_put(tree, specs[0], meshes[0])
            save(folder, placed, number)
            found = restore(folder, px.eval_shape(lambda tree=tree: tree), specs=specs[1], mesh=meshes[1])
        assert_same(found, px.device_put(tree, specs[1], meshes[1]))
        parts = [{tuple(t.shape) for t in value.to_local()._local_tensors.values()} for value in placed]
        uneven += any(len(part) > 1 for part in parts)
    assert uneven > times // 8, uneven
    return times


if __name__ == "__main__":
    print(f"{run(int(sys.argv[1]) if len(sys.argv) > 1 else 200)} pairs of meshes, the same bits")
