"""The format as its page describes it: the page's reader, which knows nothing of this library, reads what is saved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import ptrainx as px
from ptrainx.checkpoint import restore, save
from tests.checkpoint.cases import DTYPES, MESHES, assert_same, random_bytes, specs_of, state
from tests.docs.pages import ROOT, blocks

PAGE = ROOT / "docs" / "reference" / "checkpoint-format.md"


@pytest.fixture(scope="module")
def read_step():
    """The reader of the page."""
    namespace: dict[str, object] = {}
    exec(next(block.text for block in blocks(PAGE) if block.language == "python"), namespace)
    return namespace["read_step"]


@pytest.mark.parametrize("name", MESHES)
def test_the_reader_of_the_page_reads_every_mesh(read_step, tmp_path, name):
    mesh = px.make_mesh(MESHES[name][0], simulate=True)
    found = read_step(save(tmp_path, {"params": px.device_put(state(), specs_of(name), mesh), "n": -31}, 1))
    assert found.pop("n") == "-0x1f"
    assert found.keys() == {f"params/{leaf}" for leaf in state()}
    for leaf, value in state().items():
        array = found[f"params/{leaf}"]
        assert array.shape == tuple(value.shape)
        assert array.tobytes() == value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_the_reader_of_the_page_reads_every_dtype(read_step, tmp_path):
    values = {str(dtype): random_bytes(3, 4, dtype=dtype) for dtype in DTYPES}
    found = read_step(save(tmp_path, values, 1))
    for name, value in values.items():
        assert found[name].tobytes() == value.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert value.dtype.itemsize == found[name].dtype.itemsize
        if value.dtype not in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
            assert found[name].dtype == value.numpy().dtype


VERSION_1 = Path(__file__).parent / "version_1"
"""A checkpoint that was written when the format was new; whatever changes, it restores."""


def test_a_checkpoint_of_version_1_restores():
    w = torch.arange(16.0).reshape(4, 4)
    tree = {"w": w, "tied": [w, np.float16(0.5)], "t": (1, 2.5, True, "x", b"y", 1j), "z": torch.zeros(0, 2).bfloat16()}
    found = restore(VERSION_1, like=tree)
    assert_same(found, tree)
    assert found["tied"][0] is found["w"]
    mesh = px.make_mesh(data=4, simulate=True)
    assert (
        restore(VERSION_1, like=tree, mesh=mesh, specs={**dict.fromkeys(tree), "w": px.P(None, "data")})["w"].sum()
        == 120
    )
