"""The operators that random programs are made of, with what they fit and how their settings are drawn.

All are smooth where values move by rounding, but for a few whose jumps are far from the values at hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor

import ptrainx as px
from ptrainx import P
from tests.random_programs.placements import specs

__all__ = ["OPERATORS", "Operator"]

Settings = Callable[[Any, Tensor, dict[str, int]], "tuple[Any, ...] | None"]
"""Draws the arguments that are no values, given the first value and the mesh; None where the operator does not fit."""


def _none(draw: Any, x: Tensor, mesh: dict[str, int]) -> tuple[Any, ...]:
    return ()


@dataclasses.dataclass(frozen=True, eq=False)
class Operator:
    """One operator.

    Attributes:
        name: for the text of a program.
        run: the function: values, then settings.
        operands: how many values it reads.
        fits: whether a value may stand beside the first.
        settings: draws the rest.
    """

    name: str
    run: Callable[..., Tensor]
    operands: int = 1
    fits: Callable[[Tensor, Tensor], bool] = lambda x, y: True
    settings: Settings = _none


def _broadcasts(x: Tensor, y: Tensor) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(reversed(x.shape), reversed(y.shape)))


def _dim(draw: Any, x: Tensor, mesh: dict[str, int]) -> tuple[Any, ...] | None:
    return (draw(st.integers(0, x.ndim - 1)),) if x.ndim else None


def _dim_keep(draw: Any, x: Tensor, mesh: dict[str, int]) -> tuple[Any, ...] | None:
    return (*_dim(draw, x, mesh), draw(st.booleans())) if x.ndim else None


def _dim_long(draw: Any, x: Tensor, mesh: dict[str, int]) -> tuple[Any, ...] | None:
    """A dim of more than one element."""
    dims = [d for d in range(x.ndim) if x.shape[d] > 1]
    return (draw(st.sampled_from(dims)),) if dims else None


def _two_dims(draw: Any, x: Tensor, mesh: dict[str, int]) -> tuple[Any, ...] | None:
    return tuple(draw(st.permutations(range(x.ndim)))[:2]) if x.ndim >= 2 else None


def _order(draw: Any, x: Tensor, mesh: dict[str, int]) -> tuple[Any, ...] | None:
    return (tuple(draw(st.permutations(range(x.ndim)))),) if x.ndim >= 2 else None


def _new_dim(draw: Any, x: Tensor, mesh: dict[str, int]) -> tuple[Any, ...] | None:
    return (draw(st.integers(0, x.ndim)),) if x.ndim < 4 else None


def _merged(draw: Any, x: Tensor, mesh: dict[str, int]) -> tuple[Any, ...] | None:
    return (draw(st.integers(0, x.ndim - 2)),) if x.ndim >= 2 else None


def _cut(draw: Any, x: Tensor, mesh: dict[str, int]) -> tuple[Any, ...] | None:
    """A dim in two factors."""
    ways = [(d, k) for d in range(x.ndim) for k in range(2, x.shape[d]) if x.shape[d] % k == 0]
    return draw(st.sampled_from(ways)) if ways and x.ndim < 4 else None


def _shape(draw: Any, x: Tensor, mesh: dict[str, int]) -> tuple[Any, ...] | None:
    """Another shape of as many elements, of up to three dims."""
    n = x.numel()
    ways = [(a, b, n // a // b) for a in range(1, n + 1) if n % a == 0 for b in range(1, n // a + 1) if n // a % b == 0]
    return (draw(st.sampled_from(ways)),) if 1 < n <= 96 else None


def _slice(draw: Any, x: Tensor, mesh: dict[str, int]) -> tuple[Any, ...] | None:
    dim = _dim_long(draw, x, mesh)
    if dim is None:
        return None
    start = draw(st.integers(0, x.shape[dim[0]] - 1))
    stop = draw(st.integers(start + 1, x.shape[dim[0]]))
    return (*dim, start, stop, draw(st.sampled_from((1, 1, 2))))


def _index(draw: Any, x: Tensor, mesh: dict[str, int]) -> tuple[Any, ...] | None:
    dim = _dim_long(draw, x, mesh)
    if dim is None:
        return None
    return (*dim, tuple(draw(st.lists(st.integers(0, x.shape[dim[0]] - 1), min_size=1, max_size=6))))


def _pad(draw: Any, x: Tensor, mesh: dict[str, int]) -> tuple[Any, ...] | None:
    return ((draw(st.integers(0, 2)), draw(st.integers(0, 2))),) if x.ndim else None


def _repeats(draw: Any, x: Tensor, mesh: dict[str, int]) -> tuple[Any, ...] | None:
    return tuple(draw(st.integers(1, 2)) for _ in range(x.ndim)) if x.ndim else None


def _spec(draw: Any, x: Tensor, mesh: dict[str, int]) -> tuple[Any, ...] | None:
    return (draw(specs(tuple(x.shape), mesh)),)


def _scalar(draw: Any, x: Tensor, mesh: dict[str, int]) -> tuple[Any, ...]:
    return (draw(st.sampled_from((-1.5, -1, 0.25, 2, 3))),)


def _classes(x: Tensor) -> Tensor:
    """Integers from 0 to 4 that no rounding changes, without a gradient."""
    return (torch.arange(x.numel()) * 7 % 5).reshape(x.shape) + 0 * (x.detach() > 1e6).long()


def _norm_of(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _scattered(x: Tensor) -> Tensor:
    index = (torch.arange(x.numel()) * 3 % x.shape[0]).reshape(x.shape)
    return torch.zeros_like(x).scatter_add(0, index, x)


def _resharded(x: Tensor, spec: P) -> Tensor:
    """At another placement; what one device has is where it is."""
    return px.reshard(x, spec) if isinstance(x, DTensor) else x


def _scanned(x: Tensor) -> Tensor:
    rows = _resharded(x, P())
    return px.scan(lambda c, row: (c * 0.5 + row, c.tanh()), torch.zeros_like(rows[0]), rows)[1]


def _longer(x: Tensor) -> bool:
    return x.ndim >= 1 and x.shape[-1] > 1


def _if(condition: Callable[[Tensor], bool]) -> Settings:
    return lambda draw, x, mesh: () if condition(x) else None


OPERATORS: tuple[Operator, ...] = (
    Operator("tanh", torch.tanh),
    Operator("sigmoid", torch.sigmoid),
    Operator("gelu", F.gelu),
    Operator("exp_tanh", lambda x: torch.tanh(x).exp()),
    Operator("square", torch.square),
    Operator("neg", torch.neg),
    Operator("root", lambda x: (x.square() + 1).sqrt()),
    Operator("relu", F.relu),
    Operator("abs", torch.abs),
    Operator("clamp", lambda x, bound: x.clamp(min=-abs(bound), max=0.7), settings=_scalar),
    Operator("add_scalar", lambda x, s: x + s, settings=_scalar),
    Operator("rsub_scalar", lambda x, s: s - x, settings=_scalar),
    Operator("mul_scalar", lambda x, s: x * s, settings=_scalar),
    Operator("pow", lambda x: torch.tanh(x) ** 3),
    Operator("masked_fill", lambda x: x.masked_fill(x.detach() > 0.1, -2.0)),
    Operator("where_scalar", lambda x: torch.where(x.detach() > 0.1, x * 2, 1.0)),
    Operator("detach", lambda x: x.detach() * x),
    Operator("to_float_and_back", lambda x: (x.float() * 0).double() + x),
    Operator("add", torch.add, 2, _broadcasts),
    Operator("sub", torch.sub, 2, _broadcasts),
    Operator("mul", torch.mul, 2, _broadcasts),
    Operator("div", lambda x, y: x / (y.square() + 1), 2, _broadcasts),
    Operator("maximum", torch.maximum, 2, _broadcasts),
    Operator("where", lambda x, y: torch.where(x.detach() > y.detach() + 0.1, x, y), 2, _broadcasts),
    Operator("lerp", lambda x, y: torch.lerp(x, y, 0.3), 2, lambda x, y: x.shape == y.shape),
    Operator("sum", lambda x, d, k: x.sum(d, keepdim=k), settings=_dim_keep),
    Operator("sum_all", torch.sum),
    Operator("mean", lambda x, d, k: x.mean(d, keepdim=k), settings=_dim_keep),
    Operator("mean_two", lambda x, a, b: x.mean((a, b)), settings=_two_dims),
    Operator("amax", lambda x, d, k: x.amax(d, keepdim=k), settings=_dim_keep),
    Operator("max_values", lambda x, d, k: x.max(d, keepdim=k).values, settings=_dim_keep),
    Operator("variance", lambda x, d: x.var(d, correction=0), settings=_dim),
    Operator("logsumexp", lambda x, d, k: x.logsumexp(d, keepdim=k), settings=_dim_keep),
    Operator("norm", lambda x: (x + 2).norm(), settings=_if(lambda x: x.ndim > 0)),
    Operator("norm_dim", lambda x, d: torch.linalg.vector_norm(x.square() + 1, dim=d), settings=_dim),
    Operator("prod", lambda x, d: (x.tanh() + 2).prod(d), settings=_dim),
    Operator("argmax", lambda x, d: x.argmax(d).double() * 0.1, settings=_dim),
    Operator("softmax", lambda x, d: x.softmax(d), settings=_dim),
    Operator("log_softmax", lambda x, d: x.log_softmax(d), settings=_dim),
    Operator("cumsum", lambda x, d: x.cumsum(d), settings=_dim),
    Operator("layer_norm", _norm_of, settings=_if(_longer)),
    Operator("rms_norm", lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-6), settings=_if(_longer)),
    Operator("sort", lambda x, d: x.sort(d).values, settings=_dim_long),
    Operator("topk", lambda x, d: x.topk(1, d).values, settings=_dim_long),
    Operator("transpose", lambda x, a, b: x.transpose(a, b), settings=_two_dims),
    Operator("permute", lambda x, order: x.permute(order), settings=_order),
    Operator("unsqueeze", lambda x, d: x.unsqueeze(d), settings=_new_dim),
    Operator("squeeze", torch.squeeze),
    Operator("merge", lambda x, d: x.flatten(d, d + 1), settings=_merged),
    Operator("cut", lambda x, d, k: x.unflatten(d, (k, -1)), settings=_cut),
    Operator("reshape", lambda x, shape: x.reshape(shape), settings=_shape),
    Operator("expand", lambda x: x.unsqueeze(0).expand(2, *x.shape), settings=_if(lambda x: x.ndim < 4)),
    Operator("flip", lambda x, d: x.flip(d), settings=_dim),
    Operator("roll", lambda x, d: x.roll(1, d), settings=_dim),
    Operator("slice", lambda x, d, a, b, s: x[(slice(None),) * d + (slice(a, b, s),)], settings=_slice),
    Operator("select", lambda x, d: x.select(d, -1), settings=_dim),
    Operator("chunk", lambda x, d: x.chunk(2, d)[-1], settings=_dim_long),
    Operator("index_select", lambda x, d, i: x.index_select(d, torch.tensor(i)), settings=_index),
    Operator("index", lambda x, d, i: x.movedim(d, 0)[torch.tensor(i)], settings=_index),
    Operator("pad", lambda x, p: F.pad(x, p), settings=_pad),
    Operator("repeat", lambda x, *r: x.repeat(*r), settings=_repeats),
    Operator("cat", lambda x, y: torch.cat([x, y], -1), 2, lambda x, y: x.ndim > 0 and x.shape == y.shape),
    Operator(
        "cat_first",
        lambda x, y: torch.cat([y, x], 0),
        2,
        lambda x, y: x.ndim > 0 and x.shape[1:] == y.shape[1:] and y.ndim == x.ndim,
    ),
    Operator("stack", lambda x, y: torch.stack([x, y], -1), 2, lambda x, y: x.ndim < 4 and x.shape == y.shape),
    Operator("tril", torch.tril, settings=_if(lambda x: x.ndim >= 2)),
    Operator("scatter_add", _scattered, settings=_if(lambda x: x.ndim > 0)),
    Operator("gather", lambda x: x.gather(0, _classes(x) % x.shape[0]), settings=_if(lambda x: x.ndim > 0)),
    Operator(
        "one_hot", lambda x: F.one_hot(_classes(x), 5).double() * x.unsqueeze(-1), settings=_if(lambda x: x.ndim < 3)
    ),
    Operator(
        "cross_entropy",
        lambda x: F.cross_entropy(x, _classes(x[:, 0]) % x.shape[1]),
        settings=_if(lambda x: x.ndim == 2),
    ),
    Operator("matmul", torch.matmul, 2, lambda x, y: x.ndim >= 1 and y.ndim == 2 and y.shape[0] == x.shape[-1]),
    Operator(
        "matmul_t", lambda x, y: x @ y.mT, 2, lambda x, y: y.ndim == 2 and x.ndim >= 1 and y.shape[1] == x.shape[-1]
    ),
    Operator("gram", lambda x: x.mT @ x, settings=_if(lambda x: x.ndim >= 2)),
    Operator("outer", lambda x, y: torch.einsum("...i,j->...ij", x, y), 2, lambda x, y: 0 < x.ndim < 3 and y.ndim == 1),
    Operator(
        "bmm",
        lambda x, y: torch.einsum("bij,bkj->bik", x, y),
        2,
        lambda x, y: x.ndim == 3 and y.ndim == 3 and x.shape[0] == y.shape[0] and x.shape[2] == y.shape[2],
    ),
    Operator(
        "attention",
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        settings=_if(lambda x: x.ndim >= 3),
    ),
    Operator("reshard", _resharded, settings=_spec),
    Operator("remat", lambda x: px.remat(lambda x: torch.tanh(x) * x)(x)),
    Operator("scan_rows", _scanned, settings=_if(lambda x: x.ndim >= 1)),
    Operator("scan_carry", lambda x: px.scan(lambda c, _: (c.tanh() * c + 1, None), x, None, length=3)[0]),
    Operator("checkpointed_sum", lambda x: px.remat(lambda x: x.exp().sum(-1))(x.tanh()), settings=_if(_longer)),
)
