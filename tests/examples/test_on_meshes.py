"""The examples' models on a mesh of two axes; `python -m tests.examples.on_meshes` runs them on every mesh."""

from __future__ import annotations

import pytest

from tests.examples.on_meshes import MESHES, MODELS, check


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt"])  # of which test_gpt_runs.py tells more
def test_losses_and_gradients_are_those_of_one_device(name: str) -> None:
    check(name, next(axes for axes in MESHES[name] if sorted(axes.values())[-2:] == [2, 2]))
