"""Mistakes that people make, by name: each a function that raises a typed error. `messages.txt` holds what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import ptrainx as px
from ptrainx import P

__all__ = ["MISTAKES"]

MESH = px.make_mesh(data=2, model=2, simulate=True)
X = torch.arange(16.0).reshape(4, 4)
KEY = px.random.key(0)
PARAMS = {"blocks": [{"up": torch.ones(4, 8), "down": torch.ones(8, 4)} for _ in range(2)], "head": torch.ones(4, 3)}


def placed(spec: P = P("data")) -> Any:
    """X on the mesh."""
    return px.device_put(X, spec, MESH)


def jitted(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A function run as a step."""
    return px.jit(fn, mesh=MESH, **options)(*args)


def per_shard(fn: Callable[..., Any], *, in_specs: Any = P("data"), out_specs: Any = P("data")) -> Any:
    """A function of one rank's parts, run on X."""
    return jitted(px.shard_map(fn, in_specs=in_specs, out_specs=out_specs), X)


def used_after_donation() -> Any:
    x = placed()
    jitted(lambda x: x + 1, x, donate_argnums=0)
    return x + 1


def donated_twice() -> Any:
    x = placed()
    return jitted(lambda a, b: (a + 1, b + 1), x, x, donate_argnums=(0, 1))


def captured_and_changed() -> Any:
    scale = torch.ones(4)
    step = px.jit(lambda x: x * scale, mesh=MESH)
    step(X)
    scale.mul_(2)
    return step(X)


def mismatched_batch() -> Any:
    grads = px.accumulate_grads(px.value_and_grad(lambda w, b: (b @ w).sum()), 3)
    return grads(torch.ones(4, 4), X)


MISTAKES: dict[str, Callable[[], Any]] = {
    # Meshes and specs.
    "a mesh larger than the world": lambda: px.make_mesh(data=4),
    "a mesh axis of size nought": lambda: px.make_mesh(data=0, simulate=True),
    "two mesh axes of unknown size": lambda: px.make_mesh(data=-1, model=-1, simulate=True),
    "a spec with an axis that the mesh lacks": lambda: px.device_put(X, P("batch"), MESH),
    "a spec with more entries than dims": lambda: px.device_put(X, P("data", None, "model"), MESH),
    "a spec that names an axis twice": lambda: px.device_put(X, P("data", "data"), MESH),
    "a spec with the axes of a dim in another order": lambda: px.device_put(X, P(("model", "data")), MESH),
    "an entry of a spec that is no axis": lambda: P(0),
    "an axis both split and owed": lambda: P("data", unreduced=("data",)),
    "specs of another structure": lambda: px.device_put({"a": X, "b": X}, {"a": P()}, MESH),
    "no rule for a leaf": lambda: px.match_rules([(r"/up$", P(None, "model"))], PARAMS),
    "a value of no known type": lambda: px.device_put({"x": object()}, P(), MESH),
    "an argument placed otherwise": lambda: jitted(lambda x: x, placed(P("model")), in_specs=P("data")),
    "an argument on another mesh": lambda: jitted(
        lambda x: x, px.device_put(X, P(), px.make_mesh(data=4, simulate=True))
    ),
    "a result that owes no sum": lambda: jitted(lambda x: x * 2, X, out_specs=P(unreduced=("data",))),
    "values of two meshes": lambda: px.device_get(
        px.reshard([placed(), px.device_put(X, P(), px.make_mesh(data=2, simulate=True))], P())
    ),
    # What a step can be made of.
    "a branch on a value": lambda: jitted(lambda x: x if x.sum() > 0 else -x, X),
    "a value made a Python number": lambda: jitted(lambda x: x * float(x.mean()), X),
    "a value printed": lambda: jitted(lambda x: print(f"{x.sum():.3f}"), X),
    "a value made a numpy array": lambda: jitted(lambda x: x.numpy(), X),
    "a shape that depends on values": lambda: jitted(lambda x: x[x > 3], X),
    "an argument written in place": lambda: jitted(lambda x: x.add_(1), X),
    "a captured tensor written in place": lambda: jitted(lambda x: PARAMS["head"].add_(x.sum()), X),
    "a captured tensor that has changed": captured_and_changed,
    "random numbers without a key": lambda: jitted(lambda x: x + torch.randn(4), X),
    "dropout without a key": lambda: jitted(lambda x: F.dropout(x, 0.1), X),
    "a local part inside a step": lambda: jitted(lambda x: x.to_local(), X),
    "an unknown backend": lambda: px.jit(lambda x: x, mesh=MESH, backend="fast"),
    "a static argument that is donated": lambda: px.jit(lambda x, n: x, static_argnums=1, donate_argnums=1),
    "a static argument that can't be hashed": lambda: jitted(lambda x, n: x, X, [1], static_argnums=1),
    "a result that is no tensor": lambda: jitted(lambda x: (x, object()), X),
    "used after donation": used_after_donation,
    "donated twice": donated_twice,
    # Transforms.
    "the gradient of what is no scalar": lambda: px.grad(lambda x: x * 2)(X),
    "the gradient by an integer": lambda: px.grad(lambda x: x.sum())(torch.arange(4)),
    "the gradient of an integer": lambda: px.grad(lambda x: x.argmax())(X),
    "the gradient by no argument": lambda: px.grad(lambda x: x.sum(), argnums=1)(X),
    "has_aux without a pair": lambda: px.value_and_grad(lambda x: x.sum(), has_aux=True)(X),
    "a placed value moved inside px.grad, outside a step": lambda: px.grad(lambda x: px.reshard(x, P("model")).sum())(
        placed()
    ),
    "a copy to the host inside px.grad, outside a step": lambda: px.grad(lambda x: px.device_get(x * 2).sum())(X),
    "a loop whose carry changes its shape": lambda: px.scan(lambda c, x: (torch.cat([c, x]), None), X[0], X),
    "a loop whose body gives no pair": lambda: px.scan(lambda c, x: c + x, X[0], X),
    "a loop without a length": lambda: px.scan(lambda c, _: (c, None), X, None),
    "a loop over a sharded dim": lambda: jitted(
        lambda x: px.scan(lambda c, r: (c + r, None), torch.zeros(4), x), X, in_specs=P("data")
    ),
    "a batch that microbatches do not divide": mismatched_batch,
    "no microbatches": lambda: px.accumulate_grads(px.grad(lambda w, b: (b @ w).sum()), 0),
    # Per-shard programs.
    "a varying value claimed to be the same": lambda: per_shard(lambda x: x.sum(0), out_specs=P()),
    "a collective outside shard_map": lambda: jitted(lambda x: px.psum(x, "data"), X),
    "a collective over an axis that is not there": lambda: per_shard(lambda x: px.psum(x, "batch")),
    "parts that do not divide": lambda: per_shard(lambda x: px.psum_scatter(x[:1], "data", scatter_dimension=0)),
    "a permutation with a rank twice": lambda: per_shard(lambda x: px.ppermute(x, "data", [(0, 1), (1, 1)])),
    "px.reshard inside shard_map": lambda: per_shard(lambda x: px.reshard(x, P())),
    # Random numbers.
    "a seed for a key": lambda: px.random.normal(0, (4,)),
    "a rate above one": lambda: px.random.dropout(KEY, X, 1.5),
    "dropout with its arguments turned": lambda: px.random.dropout(X, KEY, 0.1),
    "an empty range of integers": lambda: px.random.randint(KEY, (4,), 3, 3),
    "stochastic rounding of integers": lambda: px.random.stochastic_round(KEY, torch.arange(4)),
    # Optimizers.
    "a learning rate below nought": lambda: px.optim.adamw(-1e-3),
    "a decay rate of one": lambda: px.optim.adamw(1e-3, b1=1.0),
    "a clip of nought": lambda: px.optim.clip_by_global_norm(0.0),
    "updates of another structure": lambda: px.optim.apply_updates({"a": X}, {"b": X}),
    "decay without parameters": lambda: px.optim.adamw(1e-3).update(X, px.optim.adamw(1e-3).init(X)),
    "a schedule without steps": lambda: px.optim.cosine_decay_schedule(1e-3, 0),
    # Precision and printing.
    "a precision in integers": lambda: px.Precision(compute=torch.int8),
    "a template without its value": lambda: px.debug.print("{} of {}", X.sum()),
    # Data.
    "a batch that the mesh does not divide": lambda: px.data.Loader([X] * 8, batch_size=3, mesh=MESH),
    "a loader without samples": lambda: px.data.Loader([], batch_size=2, mesh=MESH),
    "a text that is missing": lambda: px.data.read_bytes(["no/such/file.txt"]),
    "a file of metrics that is missing": lambda: px.observe.read_metrics("no/such/metrics.jsonl"),
}
"""Every mistake, by what it is."""
