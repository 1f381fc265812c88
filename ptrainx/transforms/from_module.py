"""`from_module`: a `torch.nn.Module` as a pure function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.func import functional_call

__all__ = ["from_module"]


def from_module(module: torch.nn.Module) -> tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]:
    """Takes a module apart into a pure function, its parameters and its buffers.

    The trees are nested dicts by the module's names, so that rules see paths such as `layers/0/linear1/weight`. Tied
    parameters appear once, under their first name. The module itself is left as it is.

    Args:
        module: any module. Dropout has no key in it: call `.eval()`, or set its rate to 0, before it is jitted.

    Returns:
        (apply, params, buffers): `apply(params, buffers, *args, **kwargs)` gives (output, new_buffers), where
        new_buffers holds what the call wrote into buffers (running statistics), equal to buffers if it wrote none.

    >>> apply, params, buffers = from_module(torch.nn.Linear(4, 2))
    >>> out, buffers = apply(params, buffers, torch.ones(3, 4))
    >>> out.shape
    torch.Size([3, 2])
    """
    params = {name: p.detach().clone() for name, p in module.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()}

    def apply(params: Any, buffers: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        flat = _flat(params)
        # The module writes into the copies; whoever passed the buffers keeps theirs.
        running = {name: value.clone() for name, value in _flat(buffers).items()}
        out = functional_call(module, {**flat, **running}, args, kwargs)
        return out, _nested(running)

    return apply, _nested(params), _nested(buffers)


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat
