"""The examples' models, their losses and gradients compared with one device on every mesh.

`python -m tests.examples.on_meshes [NAME ...]` runs them all, in minutes; the suite runs each on one mesh.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import ptrainx as px
from ptrainx import P
from tests.examples.gpt import load
from tests.examples.single_file import load_example

__all__ = ["MESHES", "MODELS", "Case", "check"]


class Case(NamedTuple):
    """A loss with its arguments, and where they lie."""

    loss: Callable[..., torch.Tensor]
    args: tuple
    specs: tuple


def _rows(axes: dict[str, int], *names: str) -> P:
    """The batch over those of the named axes that the mesh has."""
    found = tuple(name for name in names if axes.get(name, 1) > 1)
    return P(found or None)


def gpt(axes: dict[str, int]) -> Case:
    """The GPT: `data` splits the batch, `model` heads and hidden units, `zero` the parameters as they are stored."""
    example = load()
    config = example.model.Config(width=16, layers=2, heads=4, context=16)
    params = example.model.init(px.random.key(0), config)
    mesh = px.AbstractMesh(axes)
    used = example.sharding.tensor_parallel(params, config, mesh)
    stored = px.tree.map(lambda spec, w: _split(spec, w, axes), used, params) if "zero" in axes else used
    place = lambda x: px.reshard(x, _rows(axes, "data", "zero"))  # noqa: E731

    def loss(params: Any, batch: Any) -> torch.Tensor:
        return example.model.mean_loss(px.reshard(params, used), batch, config, place)

    return Case(loss, (params, _text(16)), (stored, _rows(axes, "data", "zero")))


def _split(spec: P, value: torch.Tensor, axes: dict[str, int]) -> P:
    entries = [*spec, *[None] * (value.ndim - len(spec))]
    for dim, n in enumerate(value.shape):
        if entries[dim] is None and n % axes["zero"] == 0:
            entries[dim] = "zero"
            break
    return P(*entries)


def vit(axes: dict[str, int]) -> Case:
    """The vision transformer: `data` splits the batch, `model` heads and hidden units, `seq` the patches."""
    example = load_example("vit/vit.py")
    config = example.Config(width=16, layers=2, heads=4)
    params = example.init(px.random.key(0), config)
    training, _ = example.images()
    batch = {name: torch.from_numpy(values[:8]) for name, values in training.items()}
    loss = lambda params, batch: example.loss(params, batch, config, example.place(axes))  # noqa: E731
    return Case(loss, (params, batch), (example.specs(params, axes), _rows(axes, "data")))


def moe(axes: dict[str, int]) -> Case:
    """The GPT with experts: `data` and `expert` split the batch, `expert` the experts, `model` the heads."""
    example = load_example("moe/moe_gpt.py")
    config = example.Config(width=16, layers=2, heads=4, context=16)
    params = example.init(px.random.key(0), config)

    def loss(params: Any, batch: Any) -> torch.Tensor:
        return example.loss(params, batch, config, axes)[0]

    return Case(loss, (params, _text(16)), (example.specs(params, axes), example.rows(axes)))


def long_context(axes: dict[str, int]) -> Case:
    """The GPT on long windows: `data` splits the batch, `model` the heads, `seq` the sequence."""
    example = load_example("long_context/long_context.py")
    config = example.Config(width=16, layers=2, heads=4, context=32, chunk=64)
    params = example.init(px.random.key(0), config)
    loss = lambda params, batch: example.loss(params, batch, config, axes)  # noqa: E731
    return Case(loss, (params, _text(32)), (example.specs(params, axes), _rows(axes, "data")))


def _text(length: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randint(256, (8, length), generator=torch.Generator().manual_seed(i)) for i in range(2))


MODELS: dict[str, Callable[[dict[str, int]], Case]] = {
    "gpt": gpt,
    "vit": vit,
    "moe": moe,
    "long_context": long_context,
}
"""Each gives its case for a mesh."""


def _meshes(first: str, second: str, third: str) -> list[dict[str, int]]:
    axes = (first, second, third)
    pairs = [(first, second), (second, third), (first, third)]
    return [
        {first: 1},
        *({axis: n} for n in (2, 4) for axis in axes),
        *(dict.fromkeys(pair, 2) for pair in pairs),
        dict.fromkeys(axes, 2),
    ]


MESHES: dict[str, list[dict[str, int]]] = {
    "gpt": _meshes("data", "zero", "model"),
    "vit": _meshes("data", "model", "seq"),
    "moe": [axes if "expert" in axes else axes | {"expert": 1} for axes in _meshes("data", "expert", "model")],
    "long_context": _meshes("data", "model", "seq"),
}
"""Meshes of 1, 2, 4, 2x2 and 2x2x2 devices, each axis in its turn."""


def check(name: str, axes: dict[str, int]) -> None:
    """Compares a model on a mesh with one device.

    Raises:
        InvarianceError: another loss, or another gradient.
    """
    case = MODELS[name](axes)
    px.testing.assert_mesh_invariant(case.loss, case.args, [axes], case.specs)


def main() -> None:
    """Checks the models named on the command line, or all."""
    for name in sys.argv[1:] or MODELS:
        for axes in MESHES[name]:
            began = time.monotonic()
            check(name, axes)
            print(f"{name} on {axes}: equal ({time.monotonic() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
