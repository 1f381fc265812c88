"""Programs over plain tensors, with specs: each has to give on every mesh what it gives on one device.

A row is (function, arguments, in_specs, out_specs). The functions know nothing of meshes; called on plain tensors they
are the independent answer. Shapes are divisible by 2 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import ptrainx as px
from ptrainx import P

__all__ = ["BATCH", "MESHES", "PROGRAMS", "Row", "X", "assert_close", "values"]

MESHES = ({"data": 1, "model": 1}, {"data": 2, "model": 1}, {"data": 4, "model": 1}, {"data": 2, "model": 2})


class Row(NamedTuple):
    """A program, its arguments and its specs."""

    fn: Callable[..., Any]
    args: tuple
    in_specs: Any = None
    out_specs: Any = None


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Plain values that look random and are the same everywhere."""
    n = math.prod(shape)
    return (
        torch.frac(torch.arange(1, n + 1, dtype=torch.float64) * (0.754877666 + seed / 7))
        .sub(0.5)
        .reshape(shape)
        .to(dtype)
    )


def assert_close(got: Any, want: Any, rtol: float = 2e-5, atol: float = 1e-6) -> None:
    """Trees of one structure, shapes, dtypes, and values up to the rounding of reductions."""
    got = px.device_get(got)
    assert px.tree.structure(got) == px.tree.structure(want)
    for (path, a), b in zip(px.tree.flatten_with_path(got)[0], px.tree.leaves(want)):
        b = b if isinstance(b, torch.Tensor) else torch.tensor(b)
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda text, path=path: f"{path}: {text}")


def mlp(params: dict, x: torch.Tensor) -> torch.Tensor:
    """Two layers, hidden dim split by "model"."""
    return F.gelu(x @ params["up"] + params["bias"]) @ params["down"]


MLP = {"up": values(8, 16), "bias": values(16, seed=1), "down": values(16, 8, seed=2)}
MLP_SPECS = {"up": P(None, "model"), "bias": P("model"), "down": P("model")}


def attention(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Causal attention of 4 heads; x: [batch, time, 16], w: [16, 48]."""
    q, k, v = (x @ w).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).reshape(x.shape)


def cross_entropy(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A mean over sharded rows."""
    return F.cross_entropy(x @ w, y)


def sgd(params: dict, x: torch.Tensor) -> tuple[dict, torch.Tensor]:
    """A step of training."""
    loss, grads = px.value_and_grad(lambda p: mlp(p, x).square().mean())(params)
    return px.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def in_place(x: torch.Tensor) -> torch.Tensor:
    """Writes into what was made inside."""
    out = torch.zeros(8, 8)
    out[2:4] = x[:2]
    out.add_(1)
    out[:, 0].mul_(3)
    out.index_put_((torch.tensor([5, 6]),), x[2:4], accumulate=True)
    return out + x * 2


def factories(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Values made inside are global and replicated."""
    n = x.shape[0]
    return (
        x + torch.arange(n)[:, None],
        torch.eye(n) @ x,
        torch.full_like(x, 2.0) * x,
        torch.tensor([1, 2, 3]),
        x.new_ones(3),
        torch.linspace(0, 1, n) @ x,
        torch.where(torch.ones(n, n, dtype=torch.bool).tril(), x, torch.zeros(())),
    )


def non_linear_of_owed(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """x @ w owes a sum over the contracted dim's axis."""
    h = x @ w
    return torch.relu(h), h.exp().sum(), torch.softmax(h, -1), h.square().mean(), h.max(), (h > 0).float().mean()


def owed_in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Sums that are owed are paid when something is added in place."""
    h = x @ w
    h += 1
    h *= h
    total = h.sum()
    total += 3
    return h / total


def reductions(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Over sharded and unsharded dims."""
    return (
        x.sum(),
        x.mean(),
        x.max(),
        x.min(),
        x.amax(0),
        x.mean(0),
        x.var(1),
        x.std(),
        x.logsumexp(0),
        x.norm(),
        x.prod(1),
        x.argmax(1),
        x.abs().sum(0, keepdim=True),
    )


def shapes(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views, joins and splits."""
    a, b = x.chunk(2, 1)
    return (
        x.reshape(4, 2, 8).sum(1),
        x.reshape(-1),
        x.flatten().view(2, 32).t(),
        torch.cat([a, b * 2], 0),
        torch.stack([a, b]).permute(2, 0, 1),
        x[::2, 1:],
        x[:, None].expand(8, 3, 8).sum(1),
        x.unflatten(1, (2, 4)).transpose(1, 2).flatten(1),
        x.flip(0).roll(1, 1),
    )


def embedding(table: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A gather, and its scatter in the gradient."""
    return px.value_and_grad(lambda t: F.embedding(tokens, t).square().sum())(table)


def norms(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Over a sharded dim too."""
    return F.layer_norm(x, (8,), scale), F.rms_norm(x, (8,), scale)


def dtypes(i: torch.Tensor, b: torch.Tensor, c: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Integers, booleans, complex numbers, bfloat16, float64."""
    return i // 3 + 1, ~b, b & (i > 2), c * c.conj(), c.abs().sum(), h * 2, h.float().sum(), i.double() / 7


def nothing_given() -> torch.Tensor:
    """No arguments at all."""
    return torch.arange(6.0).reshape(2, 3).sum(0)


def scalars(x: torch.Tensor, rate: Any, step: Any, flag: Any) -> tuple[torch.Tensor, ...]:
    """Numbers come in as 0-d tensors."""
    return x * rate, torch.as_tensor(step) + 1, torch.where(torch.as_tensor(flag), x, -x), x[0, 0] * rate


X, BATCH = values(8, 8), values(8, 4, 16)
PROGRAMS: dict[str, Row] = {
    "elementwise": Row(
        lambda x, y: torch.tanh(x) * 2 + y / 3, (X, values(8, 8, seed=3)), (P("data", "model"), P("data"))
    ),
    "matmul column": Row(lambda x, w: x @ w, (X, values(8, 12)), (P("data"), P(None, "model")), P("data", "model")),
    "matmul row": Row(lambda x, w: x @ w, (X, values(8, 12)), (P("data", "model"), P("model")), P()),
    "mlp": Row(mlp, (MLP, X), (MLP_SPECS, P("data"))),
    "mlp gathered": Row(mlp, (MLP, X), (MLP_SPECS, P("data")), P()),
    "attention heads": Row(attention, (BATCH, values(16, 48)), (P("data"), P(None, "model"))),
    "attention rows": Row(attention, (BATCH, values(16, 48)), (P(("data", "model")), P()), P("data")),
    "cross entropy": Row(cross_entropy, (values(8, 12), X, torch.arange(8) % 5), (P(), P("data"), P("data"))),
    "training step": Row(sgd, (MLP, X), (MLP_SPECS, P("data")), (MLP_SPECS, P())),
    "training step, params sharded": Row(sgd, (MLP, X), (P("data"), P("data")), (P("data"), P())),
    "in place inside": Row(in_place, (X,), P("data")),
    "factories": Row(factories, (X,), P("data", "model")),
    "owed sums": Row(non_linear_of_owed, (X, values(8, 8, seed=4)), (P(None, "data"), P("data"))),
    "owed sums of two axes": Row(non_linear_of_owed, (X, values(8, 8, seed=4)), (P(None, ("data", "model")), None)),
    "reductions": Row(reductions, (X,), P("data", "model")),
    "shapes": Row(shapes, (X,), P("data")),
    "shapes of columns": Row(shapes, (X,), P(None, ("data", "model"))),
    "embedding": Row(embedding, (values(16, 4), torch.arange(24).reshape(8, 3) % 16), (P(), P("data"))),
    "norms": Row(norms, (X, values(8)), (P("data", "model"), P("model"))),
    "dtypes": Row(
        dtypes,
        (torch.arange(8), torch.arange(8) % 3 == 0, torch.complex(X, X.t())[0], X[0].bfloat16()),
        P("data"),
    ),
    "nothing given": Row(nothing_given, (), None, P(None)),
    "zero size": Row(lambda x: (x.sum(), x @ torch.ones(4, 2), x.sum(0)), (torch.zeros(0, 4),), P("data")),
    "scalars": Row(scalars, (X, 0.5, 3, True), (P("data"), None, P(), None)),
    "nested trees": Row(
        lambda t: {"b": [t["a"][0] + 1, None, ()], "c": (t["a"][1],)}, ({"a": [X, X * 2], "n": None},), P("data")
    ),
    "unknown to DTensor": Row(
        lambda x: (x // 0.3, torch.fft.fft(x, dim=0).abs(), torch.cummax(x, 0)[0]), (X,), P("data")
    ),
    "in place on owed sums": Row(owed_in_place, (X, values(8, 8, seed=4)), (P(None, "data"), P("data"))),
    "sorted": Row(lambda x: (x.sort(1).values, x.topk(2, 1).values, x.cumsum(0)), (X,), P("data")),
    "einsum": Row(
        lambda x, y: torch.einsum("bti,bsi->bts", x, y), (BATCH, BATCH * 2), (P("data"), P("data", None, "model"))
    ),
    "same twice": Row(lambda x: (x, x, x.t(), {"x": x}), (X,), P("data", "model")),
}
