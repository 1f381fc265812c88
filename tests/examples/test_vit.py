"""The vision transformer example."""

from __future__ import annotations

import pytest
import torch

import ptrainx as px
from tests.examples.single_file import load_example

vit = load_example("vit/vit.py")


def test_an_image_is_cut_into_its_patches() -> None:
    image = torch.arange(64.0).reshape(1, 8, 8)
    patches = px.ops.rearrange(image, "b (i p) (j q) -> b (i j) (p q)", p=2, q=2)
    assert patches[0, 5].tolist() == [18.0, 19.0, 26.0, 27.0]  # row 1, column 1 of the patches


def test_it_learns(capsys: pytest.CaptureFixture[str]) -> None:
    assert vit.main(["--steps", "60", "--mesh", "data=1"]) > 0.7
    assert "test images are told right" in capsys.readouterr().out
