"""The vision transformer, the mixture of experts and the long context, as their users run them."""

from __future__ import annotations

import pytest
import torch

import ptrainx as px
from tests.examples.single_file import load_example


def test_an_image_is_cut_into_its_patches() -> None:
    image = torch.arange(64.0).reshape(1, 8, 8)
    patches = px.ops.rearrange(image, "b (i p) (j q) -> b (i j) (p q)", p=2, q=2)
    assert patches[0, 5].tolist() == [18.0, 19.0, 26.0, 27.0]  # row 1, column 1 of the patches


def test_the_vision_transformer_learns(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_example("vit/vit.py").main(["--steps", "60", "--mesh", "data=1"]) > 0.7
    assert "test images are told right" in capsys.readouterr().out


def test_the_experts_learn(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_example("moe/moe_gpt.py").main(["--steps", "20", "--batch", "4", "--mesh", "expert=1"]) < 4.5
    assert "of choices dropped" in capsys.readouterr().out


def test_the_long_context_learns(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--steps", "20", "--context", "128", "--mesh", "seq=1"]
    assert load_example("long_context/long_context.py").main(arguments) < 4.5
    assert "nats a byte" in capsys.readouterr().out
