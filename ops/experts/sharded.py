"""Tokens, logits and experts' parameters of a step as one rank has them, and the results as global values again.

Inside, tokens lie along the axes that split their leading dim and along the experts' axis, experts along their axis.
Next stage: `capacity` and `dropless`, which compute on the ranks' own parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ptrainx.core import torch_compat as tc
from ptrainx.core import tree as px_tree
from ptrainx.core.avals import describe
from ptrainx.core.errors import InputError, MeshError, PtrainxError, SpecError, TraceError
from ptrainx.core.trace_context import TraceContext, current_trace, user_source
from ptrainx.mesh.per_shard import Varying, relation
from ptrainx.mesh.placement import check_spec, spec_of_placements
from ptrainx.ops.collectives.psum import psum
from ptrainx.ops.collectives.region import Region
from ptrainx.ops.collectives.relate import vary_over
from ptrainx.ops.experts.routing import MoEAux

__all__ = ["Ranks", "over_experts"]


class Ranks(NamedTuple):
    """How the parts that a body gets are spread.

    Attributes:
        experts: how many ranks share the experts.
        tokens: how many tokens there are on all ranks.
        axes: the mesh axes along which tokens differ.
    """

    experts: int
    tokens: int
    axes: tuple[str, ...]

    def total(self, x: Any) -> Any:
        """The sum over all ranks' tokens."""
        return psum(x, self.axes) if self.axes else x


Body = Callable[[Any, Any, Any, Ranks], tuple[Any, MoEAux]]
"""(tokens [groups, size, d], logits [groups, size, experts], own experts' parameters, ranks) -> (like tokens, aux)."""


def over_experts(
    name: str, body: Body, params: Any, x: Any, logits: Any, *, axis: str, k: int, groups: int | None
) -> tuple[Any, MoEAux]:
    """A mixture of experts by a function of each rank's parts.

    Args:
        name: how users call it.
        body: what to do with the parts.
        params: pytree of [experts, ...].
        x: [batch, length, d].
        logits: [batch, length, experts].
        axis: along which experts lie.
        k: how many of them a token goes to.
        groups: into how many groups tokens are divided; None for the batch.

    Returns:
        (the result [batch, length, d_out], aux).

    Raises:
        InputError, SpecError, MeshError, TraceError: as the functions that users call say.
    """
    trace, source = current_trace(), user_source()
    region = None if trace is None else trace.region
    n = _ranks(name, axis, trace, source)
    _check(name, params, x, logits, k, groups, n, region is not None, source)
    batch, length = x.shape[:2]
    groups = batch if groups is None else groups
    size = batch * length // groups
    if trace is None:
        if any(isinstance(leaf, DTensor) for leaf in px_tree.leaves((params, x, logits))):
            raise TraceError(
                f"px.ops.{name} of placed values outside of a step", fix="call it in a function given to px.jit"
            )
        out, aux = body(
            x.reshape(groups, size, -1), logits.reshape(groups, size, -1), params, Ranks(1, batch * length, ())
        )
        return out.reshape(batch, length, -1), aux
    params, x, logits = px_tree.map(trace.as_global, (params, x, logits))
    x, logits = x.reshape(groups, size, -1), logits.reshape(groups, size, -1)
    if region is not None:
        axes = vary_over(region, [x, logits])
        out, aux = body(x, logits, params, Ranks(n, batch * length * region.size(axes), axes))
        return out.reshape(batch, length, -1), aux
    tokens_at = _tokens_at(trace, x, axis)
    axes = tuple(a for a, p in zip(trace.mesh.axis_names, tokens_at) if p.is_shard())
    _check_groups(name, trace, groups, axes, batch * length, source)
    region = Region(trace, f"px.ops.{name}", check=True)
    with trace.marked(source=source):
        enter = _Entry(trace, region, name)
        inside = [enter(which, value, tokens_at) for which, value in (("x", x), ("logits", logits))]
        own = px_tree.map_with_path(
            lambda path, leaf: enter(px_tree.path_expr(path, "params"), leaf, _params_at(trace, leaf, axis, axes)),
            params,
        )
    with region.active():
        out, aux = body(inside[0], inside[1], own, Ranks(n, batch * length, axes))
        _check_result(name, region, out, axes, source)
    with trace.marked(source=source):
        whole = region.to_global(out, tokens_at, (groups, *out.shape[1:]))
        replicated = (Replicate(),) * len(tokens_at)
        told = MoEAux(*(region.to_global(value, replicated, ()) for value in aux))
    return whole.reshape(batch, length, -1), told


def _ranks(name: str, axis: str, trace: TraceContext | None, source: str) -> int:
    """How many ranks share the experts; a mesh of one device need not have their axis."""
    if trace is None:
        return 1
    if axis in trace.mesh.shape:
        return int(trace.mesh.shape[axis])
    if trace.mesh.size == 1:
        return 1
    raise MeshError(
        f"px.ops.{name}: the mesh has no axis {axis!r}",
        got=str(trace.mesh),
        fix=f"make it with one (px.make_mesh({axis}=...); its size may be 1), or name another axis",
        source=source,
    )


def _check(
    name: str, params: Any, x: Any, logits: Any, k: int, groups: int | None, n: int, per_shard: bool, source: str
) -> None:
    """Tells everything that is wrong with the arguments at once."""
    problems: list[str] = []
    kind: type[PtrainxError] = InputError
    for which, value in (("x", x), ("logits", logits)):
        if not isinstance(value, torch.Tensor) or value.ndim != 3 or not value.is_floating_point():
            problems.append(f"{which} is {describe(value)}, not floating-point [batch, length, ...]")
    if not problems:
        experts = logits.shape[2]
        if tuple(x.shape[:2]) != tuple(logits.shape[:2]):
            problems.append(f"x has shape {tuple(x.shape)}, logits {tuple(logits.shape)}: batch and length differ")
        if not 1 <= k <= experts:
            problems.append(f"k={k}, of {experts} experts")
        if groups is not None and (groups < 1 or (x.shape[0] * x.shape[1]) % groups):
            problems.append(f"groups={groups} does not divide {x.shape[0]} x {x.shape[1]} tokens")
        wanted = experts // n if per_shard else experts
        for path, leaf in px_tree.flatten_with_path(params)[0]:
            if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0 or leaf.shape[0] != wanted:
                where = px_tree.path_expr(path, "params")
                problems.append(f"{where} is {describe(leaf)}, and not of {wanted} experts along its leading dim")
        if not problems and experts % n:
            kind = SpecError
            problems.append(f"{experts} experts can't be divided over {n} ranks")
    if problems:
        raise kind(
            f"px.ops.{name}: " + "\n    ".join(problems),
            expected="x [batch, length, d], logits [batch, length, experts], params [experts, ...], 1 <= k <= experts",
            fix=f"make the number of experts a multiple of {n}" if kind is SpecError else None,
            source=source,
        )


def _check_groups(name: str, trace: TraceContext, groups: int, axes: tuple[str, ...], tokens: int, source: str) -> None:
    """Refuses groups that can't be divided over the ranks of the tokens."""
    ranks = math.prod(trace.mesh.shape[a] for a in axes)
    if groups % ranks == 0:
        return
    more = math.lcm(groups, ranks)
    other = f"pass groups={more} (which makes groups of {tokens // more} tokens), or " if name == "moe" else ""
    raise SpecError(
        f"px.ops.{name}: {groups} groups of tokens can't be divided over the {ranks} ranks of "
        f"{' x '.join(f'{a}={trace.mesh.shape[a]}' for a in axes)}",
        expected=f"a multiple of {ranks}",
        fix=f"{other}make the batch a multiple of {ranks}",
        source=source,
    )


def _tokens_at(trace: TraceContext, x: Any, axis: str) -> tuple[Placement, ...]:
    """The groups along the axes that split them, and along the experts'; an axis of size 1 splits nothing."""

    def one(name: str, own: Placement) -> Placement:
        splits = name == axis or (isinstance(own, Shard) and own.dim == 0)
        return Shard(0) if splits and trace.mesh.shape[name] > 1 else Replicate()

    return tuple(one(name, own) for name, own in zip(trace.mesh.axis_names, x.placements))


def _params_at(trace: TraceContext, leaf: Any, axis: str, tokens: tuple[str, ...]) -> tuple[Placement, ...]:
    """Experts along their axis; whole along the axes of tokens; along others as they are."""

    def one(name: str, own: Placement) -> Placement:
        if name == axis:
            return Shard(0) if trace.mesh.shape[name] > 1 else Replicate()
        return own if isinstance(own, Shard) and own.dim > 0 and name not in tokens else Replicate()

    return tuple(one(name, own) for name, own in zip(trace.mesh.axis_names, leaf.placements))


class _Entry(NamedTuple):
    """Makes per-shard values of global ones."""

    trace: TraceContext
    region: Region
    name: str

    def __call__(self, which: str, x: Any, placements: tuple[Placement, ...]) -> Any:
        spec = spec_of_placements(placements, self.trace.mesh.axis_names, x.ndim)
        check_spec(spec, self.trace.mesh, x.shape, f"px.ops.{self.name}: {which}", even=True)
        with tc.DisableTorchFunction():
            if tuple(x.placements) != placements:
                with self.trace.marked(asked=False, reason=f"px.ops.{self.name} takes {which} at {spec}"):
                    x = x.redistribute(x.device_mesh, placements)
        return self.region.to_shard(x, tuple(Varying() if p.is_shard() else p for p in placements))


def _check_result(name: str, region: Region, out: Any, axes: tuple[str, ...], source: str) -> None:
    """Refuses a result that is not the same along an axis that tokens do not lie along."""
    varies = [a for a, p in zip(region.axis_names, relation(out)) if a not in axes and not p.is_replicate()]
    if varies:
        raise SpecError(
            f"px.ops.{name}: expert_fn's result varies along {', '.join(map(repr, varies))}, as its parameters do",
            fix=f"sum what each rank has computed: px.psum(x, {varies[0]!r})",
            source=source,
        )
