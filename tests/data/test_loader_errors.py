"""What `Loader` refuses, each with a typed error that says what to do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from ptrainx.core.errors import DataError, InputError, MeshError, PtrainxError, SpecError, TreeError
from ptrainx.data import Loader
from ptrainx.mesh import AbstractMesh, P
from tests.data.cases import two


class Uneven(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return {"x": np.zeros(3 if i == 5 else 2)}


class Strings(Uneven):
    def __getitem__(self, i):
        return {"x": "text"}


class Mixed(Uneven):
    def __getitem__(self, i):
        return 1 if i < 4 else 0.5


class Restless(Uneven):
    def __getitem__(self, i):
        return (1,) if i == 5 else (1, 2)


class Nothing(Uneven):
    def __getitem__(self, i):
        return None


class Lengthless(Dataset):
    def __getitem__(self, i):
        return i


class Short(Uneven):
    def read_samples(self, indices):
        return np.zeros(max(len(indices) - 1, 1))


class Stream(IterableDataset):
    def __iter__(self):
        yield 1


REFUSED = {
    "empty array": (np.zeros((0, 2)), {}, DataError, r"the source is empty: an array of length 0\n.*fix:"),
    "empty list": ([], {}, DataError, r"the source is empty: list of length 0"),
    "empty dict": ({}, {}, DataError, r"the source is empty: dict of length 0"),
    "None": (None, {}, DataError, r"a NoneType is no source\n.*expected: +an array"),
    "bytes": (b"abc", {}, DataError, r"a bytes is no source\n(.|\n)*np\.frombuffer"),
    "missing file": ("no/such.npy", {}, DataError, r"no such file exists: 'no/such\.npy'\n(.|\n)*mmap_mode"),
    "file": (__file__, {}, DataError, r"a path is no source: '.*test_loader_errors\.py'\n(.|\n)*read_bytes"),
    "number": (3, {}, DataError, r"a source of type int can't be read by index"),
    "unequal lengths": (
        {"x": np.zeros(8), "y": np.zeros(7)},
        {},
        DataError,
        r"differ in length\n.*source\['x'\]: 8, source\['y'\]: 7\n(.|\n)*fix:",
    ),
    "scalar leaf": ({"x": np.zeros(8), "y": 3}, {}, DataError, r"source\['y'\] is no array.*\n.*int 3\n"),
    "0-d array": (torch.tensor(1.0), {}, DataError, r"source is no array with a first dim.*\n.*f32\[\]"),
    "dtype": (np.array(["a"] * 8), {}, DataError, r"source is an array of dtype <U1.*\n.*fix:"),
    "byte order": (np.zeros(8, ">i4"), {}, DataError, r"dtype >i4, which has no torch counterpart\n.*byte order"),
    "stream": (Stream(), {}, DataError, r"type Stream can't be read by index\n(.|\n)*can't be shuffled"),
    "no length": (Lengthless(), {}, DataError, r"Lengthless does not tell its length"),
    "strings": (Strings(), {}, DataError, r"a leaf of a sample of Strings is a leaf of unknown type.*str"),
    "nothing": (Nothing(), {}, DataError, r"sample 0 of Nothing holds nothing"),
    "uneven": (
        Uneven(),
        {},
        DataError,
        r"sample 5 of Uneven: sample\['x'\]: not like sample 0\n.*f64\[3\]\n.*f64\[2\]",
    ),
    "mixed": (Mixed(), {}, DataError, r"sample [4-7] of Mixed: sample: not like sample 0\n.*f32\[\]\n.*i64\[\]"),
    "restless": (Restless(), {}, DataError, r"sample 5 of Restless: not like sample 0"),
    "short": (Short(), {}, DataError, r"Short\.read_samples: result: not like sample 0\n.*f64\[\d\]\n.*f64\[\d\]"),
    "batch too large": (
        np.zeros(3),
        {},
        DataError,
        r"fewer samples than one batch.*\n.*3 samples, batch_size 4\n.*pad",
    ),
    "indivisible": (
        np.zeros(9),
        {"batch_size": 3},
        SpecError,
        r"batch: batch_size 3 is not divisible by data=2\n.*\n.*multiple of 2\n.*batch_size=4 or 2",
    ),
    "unknown axis": (np.zeros(8), {"spec": P("model")}, SpecError, r"batch: P\('model'\) names axis 'model'"),
    "owed sum": (np.zeros(8), {"spec": P(unreduced="data")}, SpecError, r"batch: .* owes a sum"),
    "spec tree": ({"x": np.zeros(8)}, {"spec": {"z": P()}}, TreeError, r"batch\['x'\]: in the value, not in the specs"),
    "batch_size": (np.zeros(8), {"batch_size": 0}, InputError, r"batch_size=0\n.*at least 1"),
    "batch_size kind": (np.zeros(8), {"batch_size": 2.0}, InputError, r"batch_size=2\.0"),
    "seed": (np.zeros(8), {"seed": -1}, InputError, r"seed=-1\n.*at least 0"),
    "epochs": (np.zeros(8), {"epochs": 0}, InputError, r"epochs=0\n.*at least 1 or None"),
    "last": (np.zeros(8), {"last": "raise"}, InputError, r"last='raise'\n.*'drop', 'pad', 'keep'"),
    "prefetch": (np.zeros(8), {"prefetch": -1}, InputError, r"prefetch=-1"),
    "mesh": (np.zeros(8), {"mesh": AbstractMesh(data=2)}, MeshError, r"AbstractMesh\(data=2\)\n(.|\n)*simulate=True"),
}


@pytest.mark.parametrize(("source", "settings", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_can_not_be_loaded_is_refused_with_what_to_do(source, settings, error, message):
    with pytest.raises(error, match=message) as caught:
        list(Loader(source, **{"batch_size": 4, "mesh": two(), **settings}))
    assert isinstance(caught.value, PtrainxError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 11}, r"of another loader: length differs\n.*length=11\n.*length=10\n.*fix:"),
        ({"seed": 1, "batch_size": 4}, r"seed, batch_size differ\n.*seed=1, batch_size=4\n.*seed=0, batch_size=2"),
        ({"shuffle": 0}, r"shuffle differs"),
        ({"batch": 5}, r"names a batch that does not exist\n.*epoch 0, batch 5 with last='drop'\n.*0 to 4"),
        ({"batch": -1}, r"names a batch that does not exist"),
        ({"epoch": -1}, r"names a batch that does not exist"),
        ({"epoch": "x"}, r"no state of a Loader"),
    ],
)
def test_a_state_of_another_loader_is_refused_and_nothing_moves(change, message):
    loader = Loader(np.arange(10), 2, mesh=two())
    next(iter(loader))
    before = loader.state_dict()
    with pytest.raises(DataError, match=message):
        loader.load_state_dict({**before, **change})
    with pytest.raises(DataError, match=r"no state of a Loader: 'epoch'\n.*\n.*epoch, batch, seed"):
        loader.load_state_dict({})
    assert loader.state_dict() == before
