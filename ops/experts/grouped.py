"""Products of many rows with several matrices, each row with the matrix of its group.

Two operators, in torch's namespace `ptrainx`, each of which gives the other's gradients:

    grouped_mm(x, w, ends)       rows of group e, which end before ends[e], times w[e]; zeros behind the last group
    grouped_outer(x, g, ends)    for each group e, the sum over its rows of x^T g
"""

from __future__ import annotations

from typing import Any

import torch

from ptrainx.core.avals import describe
from ptrainx.core.errors import InputError
from ptrainx.core.trace_context import current_trace, user_source
from ptrainx.ops.collectives.linear import varying
from ptrainx.ops.collectives.relate import vary_over

__all__ = ["grouped_matmul", "rows_within"]

T = torch.Tensor


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

    Only rows of groups are computed, one product a group; a GPU waits for the sizes. In a step it works on the values
    of one rank: in `dropless_moe`, or in the body of a `px.shard_map`.

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
    source = user_source()
    if problems:
        raise InputError(
            f"px.ops.grouped_matmul: {', and '.join(problems)}",
            got=f"x {describe(x)}, w {describe(w)}, sizes {describe(sizes)}",
            expected="x [rows, d] and w [groups, d, f] of one floating-point dtype, sizes [groups] of integers",
            source=source,
        )
    ends = sizes.cumsum(0)
    trace = current_trace()
    if trace is not None:
        x, w, ends = (trace.as_global(value) for value in (x, w, ends))
        if trace.region is not None:
            axes = vary_over(trace.region, [x, w, ends])
            x, w = varying(x, trace.region, axes, source), varying(w, trace.region, axes, source)
    return _Product.apply(x, w, ends)


def rows_within(sizes: Any, rows: int) -> Any:
    """bool [rows, 1]: which rows belong to a group."""
    return (torch.arange(rows, device=sizes.device) < sizes.sum()).unsqueeze(1)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, ends: Any) -> Any:
        ctx.save_for_backward(x, w, ends)
        return torch.ops.ptrainx.grouped_mm.default(x, w, ends)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, w, ends = ctx.saved_tensors
        return _Product.apply(grad, w.transpose(1, 2), ends), _Outer.apply(x, grad, ends), None


class _Outer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, g: Any, ends: Any) -> Any:
        ctx.save_for_backward(x, g, ends)
        return torch.ops.ptrainx.grouped_outer.default(x, g, ends)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, g, ends = ctx.saved_tensors
        return _Product.apply(g, grad.transpose(1, 2), ends), _Product.apply(x, grad, ends), None


def _spans(ends: T) -> list[tuple[int, int]]:
    stops = ends.tolist()
    return list(zip([0, *stops], stops))


def _grouped_mm(x: T, w: T, ends: T) -> T:
    out = x.new_zeros(x.shape[0], w.shape[2])
    for e, (start, stop) in enumerate(_spans(ends)):
        torch.mm(x[start:stop], w[e], out=out[start:stop])
    return out


def _grouped_outer(x: T, g: T, ends: T) -> T:
    out = x.new_zeros(ends.shape[0], x.shape[1], g.shape[1])
    for e, (start, stop) in enumerate(_spans(ends)):
        torch.mm(x[start:stop].t(), g[start:stop], out=out[e])
    return out


# A fragment, so that other files may add operators to the namespace. Kept, since its end would take them away.
_LIBRARY = torch.library.Library("ptrainx", "FRAGMENT")
_LIBRARY.define("grouped_mm(Tensor x, Tensor w, Tensor ends) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("grouped_mm", _grouped_mm, "CompositeExplicitAutograd")
_LIBRARY.impl("grouped_mm", lambda x, w, ends: x.new_empty(x.shape[0], w.shape[2]), "Meta")
_LIBRARY.define("grouped_outer(Tensor x, Tensor g, Tensor ends) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("grouped_outer", _grouped_outer, "CompositeExplicitAutograd")
_LIBRARY.impl("grouped_outer", lambda x, g, ends: x.new_empty(ends.shape[0], x.shape[1], g.shape[1]), "Meta")
