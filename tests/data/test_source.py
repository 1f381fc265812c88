"""What `Loader` reads: arrays, trees of arrays, data sets, text; each against the samples themselves."""

from __future__ import annotations

import tempfile
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from ptrainx.data import ByteWindows, Loader
from ptrainx.mesh import P, device_get, make_mesh
from tests.data.cases import order, two


class Images(Dataset):
    """A torch data set of dicts with a tensor, an array, and numbers."""

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return {"x": torch.full((2,), float(i)), "a": np.float32([i]), "y": i, "w": i / 2, "f": i % 2 == 0}


class Batched(Images):
    """Reads several items at once, as torch's loader lets data sets do."""

    def __getitems__(self, indices):
        return [super(Batched, self).__getitem__(i) for i in indices]

    def __getitem__(self, i):
        raise AssertionError("read one by one")


class Point(NamedTuple):
    x: object
    y: object


def arrays(wrap):
    return {"x": wrap(np.repeat(np.arange(10.0, dtype=np.float32)[:, None], 2, 1)), "y": wrap(np.arange(10))}


def memmap(array):
    with tempfile.NamedTemporaryFile() as file:  # the mapping outlives the name
        array.tofile(file.name)
        return np.memmap(file.name, array.dtype, "r", shape=array.shape)


class OnDisk:
    """An array as h5py gives it: increasing indices only, each once."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __getitem__(self, indices):
        assert np.all(np.diff(indices) > 0)
        return self.array[indices]


def read_only(array):
    array.setflags(write=False)
    return array


class Columns:
    """Reads many samples at once; the columns are views of its own memory."""

    memory = np.repeat(np.arange(10.0, dtype=np.float32)[:, None], 2, 1)

    def __len__(self):
        return 10

    def read_samples(self, indices):
        assert indices.dtype == np.int64
        return {"x": self.memory[indices], "y": np.arange(10)[indices]}


@pytest.mark.parametrize(
    "wrap", [np.array, torch.from_numpy, memmap, OnDisk, read_only, np.asfortranarray], ids=lambda wrap: wrap.__name__
)
def test_trees_of_arrays(wrap):
    batch = device_get(next(iter(Loader(arrays(wrap), 4, mesh=two()))))
    wanted = order(0, n=10)[:4]
    assert batch["y"].tolist() == wanted.tolist()
    assert batch["x"].dtype == torch.float32
    assert batch["x"].tolist() == [[i, i] for i in wanted]


@pytest.mark.parametrize("source", [Images(), Batched(), [Images()[i] for i in range(10)], Subset(Images(), range(10))])
def test_data_sets_of_items(source):
    batch = device_get(next(iter(Loader(source, 4, mesh=two()))))
    wanted = order(0, n=10)[:4]
    assert {k: (v.dtype, tuple(v.shape)) for k, v in batch.items()} == {
        "x": (torch.float32, (4, 2)),
        "a": (torch.float32, (4, 1)),
        "y": (torch.int64, (4,)),
        "w": (torch.float32, (4,)),
        "f": (torch.bool, (4,)),
    }
    assert batch["y"].tolist() == wanted.tolist()
    assert batch["w"].tolist() == (wanted / 2).tolist()
    assert batch["f"].tolist() == (wanted % 2 == 0).tolist()
    assert batch["x"][:, 1].tolist() == batch["a"][:, 0].tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ((np.arange(10), np.arange(10)), tuple),
        (Point(np.arange(10), torch.arange(10)), Point),
        (TensorDataset(torch.arange(10), torch.arange(10)), tuple),
        ([Point(i, i) for i in range(10)], Point),
    ],
    ids=["tuple", "NamedTuple", "TensorDataset", "list of NamedTuples"],
)
def test_a_batch_has_the_structure_of_a_sample(source, kind):
    batch = next(iter(Loader(source, 4, mesh=two())))
    assert type(batch) is kind
    assert [device_get(leaf).tolist() for leaf in batch] == [order(0, n=10)[:4].tolist()] * 2


def test_a_source_that_reads_many_at_once_keeps_its_memory():
    loader = Loader(Columns(), 10, mesh=make_mesh(data=1), shuffle=False)
    batch = next(iter(loader))
    batch["x"].to_local().zero_()
    assert batch["y"].to_local().tolist() == list(range(10))
    assert Columns.memory[:, 0].tolist() == list(range(10))


def test_windows_of_text():
    data = np.frombuffer(b"the quick brown fox jumps over the lazy dog", np.uint8)
    windows = ByteWindows(data, 8)
    inputs, targets = device_get(next(iter(Loader(windows, 6, mesh=two(), spec=P("data")))))
    for row, start in enumerate(order(0, n=len(windows))[:6]):
        assert bytes(inputs[row].tolist()) == data[start : start + 8].tobytes()
        assert bytes(targets[row].tolist()) == data[start + 1 : start + 9].tobytes()
