"""Quantiles of global values: torch computes them with changes of shape in place, which a global value can't have."""

from __future__ import annotations

from typing import Any

import torch

from ptrainx.core.errors import InputError

__all__ = ["quantile"]


def quantile(
    input: torch.Tensor, q: Any, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> torch.Tensor:
    """`torch.quantile`, by sorting; a row with a NaN gives NaN."""
    if interpolation not in ("linear", "lower", "higher", "midpoint", "nearest"):
        raise InputError(
            "quantile has no such interpolation",
            got=repr(interpolation),
            expected='"linear", "lower", "higher", "midpoint" or "nearest"',
        )
    kept = [1] * input.ndim if dim is None else [1 if d == dim % input.ndim else n for d, n in enumerate(input.shape)]
    rows = input.reshape(1, -1) if dim is None else input.movedim(dim, -1)
    rows = torch.where(rows.isnan().any(-1, keepdim=True), torch.nan, rows).sort(-1).values
    wanted = q if isinstance(q, torch.Tensor) else torch.tensor(q, dtype=input.dtype)
    place = wanted.reshape(-1) * (rows.shape[-1] - 1)
    below, above = rows.index_select(-1, place.floor().long()), rows.index_select(-1, place.ceil().long())
    weight = {
        "linear": place - place.floor(),
        "lower": torch.zeros_like(place),
        "higher": torch.ones_like(place),
        "midpoint": torch.full_like(place, 0.5),
        "nearest": place.round() - place.floor(),
    }[interpolation]
    found = (below + (above - below) * weight).movedim(-1, 0)
    whole = found.reshape([found.shape[0], *kept])
    if not keepdim:
        whole = found.reshape([found.shape[0], *(kept[:0] if dim is None else found.shape[1:])])
    return whole if wanted.ndim else whole[0]
