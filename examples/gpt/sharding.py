"""Where parameters and optimizer state lie: tensor parallelism over `model`, ZeRO over `data`."""

from __future__ import annotations

from typing import Any

from model import Config

import ptrainx as px
from ptrainx import P

__all__ = ["make_mesh", "spread_over_data", "tensor_parallel"]


def make_mesh(text: str | None, simulate: bool) -> px.Mesh:
    """The mesh that `--mesh data=2,model=2` asks for; by default all devices on one axis `data`."""
    axes = {"data": 8 if simulate else -1}
    if text is not None:
        pairs = [part.partition("=") for part in text.split(",")]
        try:
            axes = {name.strip(): int(size) for name, _, size in pairs}
        except ValueError:
            raise px.errors.MeshError(f"--mesh {text}: no mesh", expected="axes with sizes: data=2,model=2") from None
    if "data" not in axes or axes.keys() - {"data", "model"}:
        raise px.errors.MeshError(
            f"--mesh {text}: other axes than this program's", expected="data=N, or data=N,model=M"
        )
    return px.make_mesh(axes, simulate=simulate)


def tensor_parallel(params: Any, config: Config, mesh: px.Mesh) -> Any:
    """A spec for each parameter: heads and hidden units are split over `model`, the rest is replicated.

    A device computes attention with its heads and the MLP with its hidden units, so that a sublayer takes one sum over
    `model`, of what the devices write to the residual stream. What `model` does not divide is replicated.

    Args:
        params: parameters, or their shapes.
        config: the model's sizes.
        mesh: with or without an axis `model`.

    Source: Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053.
    """
    devices = mesh.shape.get("model", 1)
    model = "model" if devices > 1 else None
    heads = model if config.heads % devices == 0 else None
    hidden = model if 4 * config.width % devices == 0 else None
    rules = [
        (r"/(q|k|v)$", P(None, heads)),
        (r"/o$", P(heads)),
        (r"/up$", P(None, hidden)),
        (r"/down$", P(hidden)),
        (r".*", P()),
    ]
    return px.match_rules(rules, params)


def spread_over_data(specs: Any, values: Any, mesh: px.Mesh) -> Any:
    """The same specs with one more dim of each value split over `data`: the largest that it divides, if there is one.

    Args:
        specs: a spec for each value.
        values: tensors, or their shapes.
        mesh: with an axis `data`.

    Source: Rajbhandari et al., "ZeRO", 2020, https://arxiv.org/abs/1910.02054.
    """
    devices = mesh.shape["data"]

    def spread(spec: P, value: Any) -> P:
        entries = [*spec, *[None] * (len(value.shape) - len(spec))]
        free = [d for d, n in enumerate(value.shape) if entries[d] is None and n % devices == 0]
        if devices > 1 and free:
            entries[max(free, key=lambda d: value.shape[d])] = "data"
        return P(*entries)

    return px.tree.map(spread, specs, values)
