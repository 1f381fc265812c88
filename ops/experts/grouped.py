"""Products of many rows with several matrices, each row with the matrix of its group."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import grouped_mm

from ptrainx.core.avals import describe
from ptrainx.core.errors import InputError
from ptrainx.core.trace_context import user_source

__all__ = ["grouped_matmul", "rows_within"]


def grouped_matmul(x: Any, w: Any, sizes: Any) -> Any:
    """The first sizes[0] rows of x times w[0], the next sizes[1] times w[1], and so on.

    Args:
        x: [rows, d], sorted by group.
        w: [groups, d, f], of the dtype of x.
        sizes: int [groups]: values, that need not be known when a step is traced.

    Returns:
        [rows, f]; rows behind the last group are zero, and get a gradient of zero.

    Raises:
        InputError: shapes or dtypes that do not fit each other.

    Only rows of groups are computed. In a step it works on the values of one rank: in `dropless_moe`, or in the body of
    a `px.shard_map`.

    Source: Gale et al. 2022, MegaBlocks (arXiv:2211.15841).

    >>> import torch, ptrainx as px
    >>> x, w = torch.ones(4, 2), torch.stack([torch.eye(2), 2 * torch.eye(2)])
    >>> px.ops.grouped_matmul(x, w, torch.tensor([1, 2]))[:, 0]
    tensor([1., 2., 2., 0.])
    """
    problems = []
    if x.ndim != 2 or w.ndim != 3 or sizes.ndim != 1:
        problems.append("the shapes are not [rows, d], [groups, d, f] and [groups]")
    elif w.shape[1] != x.shape[1] or sizes.shape[0] != w.shape[0]:
        problems.append("d or the number of groups differs")
    if x.dtype != w.dtype or not x.is_floating_point() or sizes.is_floating_point():
        problems.append("the dtypes are not one floating-point dtype and integers")
    if problems:
        raise InputError(
            f"px.ops.grouped_matmul: {', and '.join(problems)}",
            got=f"x {describe(x)}, w {describe(w)}, sizes {describe(sizes)}",
            source=user_source(),
        )
    within = rows_within(sizes, x.shape[0])
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    ends = sizes.cumsum(0)
    if x.dtype == torch.float64:
        return _each(x, w, ends, within, zero)
    # The kernel leaves rows behind the last group as they were in memory, here and in the gradient.
    return torch.where(within, grouped_mm(torch.where(within, x, zero), w, offs=ends.int()), zero)


def _each(x: Any, w: Any, ends: Any, within: Any, zero: Any) -> Any:
    """One product a group, of all rows: in float64, which the kernel does not have."""
    group = (torch.arange(x.shape[0], device=x.device).unsqueeze(1) >= ends).sum(1, keepdim=True)
    parts = [torch.where(within & (group == e), x, zero) @ w[e] for e in range(w.shape[0])]
    return torch.stack(parts).sum(0)


def rows_within(sizes: Any, rows: int) -> Any:
    """bool [rows, 1]: which rows belong to a group."""
    return (torch.arange(rows, device=sizes.device) < sizes.sum()).unsqueeze(1)
