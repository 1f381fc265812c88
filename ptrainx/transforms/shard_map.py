"""`shard_map`: a function of one rank's parts of values, with collectives by hand.

Inside a jitted step the body is traced with it; outside, a call is a jitted step of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ptrainx.compile.rules import storages
from ptrainx.core import torch_compat as tc
from ptrainx.core import tree as px_tree
from ptrainx.core.avals import ShapeDtypeStruct, as_tensor, describe
from ptrainx.core.errors import MeshError, SpecError, TraceError, TreeError
from ptrainx.core.trace_context import TraceContext, current_trace, defined_at, refuse_aside, user_source
from ptrainx.mesh.mesh import AbstractMesh
from ptrainx.mesh.partition_spec import P, PartitionSpec, axes_of
from ptrainx.mesh.per_shard import relation
from ptrainx.mesh.placement import check_spec, spec_of_placements, trace_placements
from ptrainx.mesh.spec_tree import SpecTree, spread
from ptrainx.mesh.transfer import default_mesh
from ptrainx.ops.collectives.linear import Claim, apply, unreduced, varying
from ptrainx.ops.collectives.region import Region
from ptrainx.ops.constrain import place_inside
from ptrainx.transforms.grad import any_differentiated
from ptrainx.transforms.jit import JitFunction
from ptrainx.transforms.outside import OutsideFunction

__all__ = ["ShardMapFunction", "shard_map"]


def shard_map(
    fn: Callable[..., Any] | None = None,
    *,
    mesh: AbstractMesh | None = None,
    in_specs: SpecTree,
    out_specs: SpecTree,
    check: bool = True,
) -> Any:
    """A function of one rank's parts of its arguments, as a function of global values; usable as a decorator.

    Inside, a value has the shape of this rank's part, operators compute on that alone, and ranks meet in `px.psum`,
    `px.all_gather` and the other named collectives. It works inside `px.jit`, on abstract meshes too, and outside,
    where a call is a jitted step of its own; under `px.grad`, inside and out.

    Values carry how the ranks' are related along each axis: the same, varying, or a sum that is owed. What an in_spec
    splits along an axis varies along it; an operator's result varies where an operand does; `px.psum` and
    `px.all_gather` make it the same again. Where a value that is the same meets one that varies, its gradient is summed
    over the ranks. So gradients are those of the program of global values.

    Args:
        fn: a function of pytrees; pure, of positional arguments.
        mesh: as for `px.jit`; inside one, that of the step.
        in_specs: a tuple with one spec tree an argument, or a lone spec for all. Arguments are moved there first, which
            counts as asked for. None keeps an argument where it is.
        out_specs: a spec tree for the result: the ranks' parts are joined along the axes that a spec names; along all
            others they have to be the same, and are one. `P(unreduced=("data",))` leaves a sum of them owed.
        check: False takes out_specs at their word, whatever the ranks hold, and leaves gradients of arguments that are
            the same on every rank to the body's own collectives where it differentiates itself.

    Returns:
        a function of global values.

    Raises:
        SpecError: a shape that a spec does not divide; an out_spec that says that a varying value is the same.
        TraceError: in the body, a sharded value from around it; a shard_map inside another.
        MeshError: another mesh than that of the step around it.

    Source: JAX's `shard_map` with varying manual axes, https://docs.jax.dev/en/latest/notebooks/shard_map.html.

    >>> from ptrainx.mesh import make_mesh
    >>> from ptrainx.ops.collectives import psum
    >>> mesh = make_mesh(data=2, simulate=True)
    >>> norm = shard_map(lambda x: psum((x * x).sum(), "data").sqrt(), mesh=mesh, in_specs=P("data"), out_specs=P())
    >>> norm(torch.tensor([3.0, 4.0]))
    tensor(5.)
    """
    if fn is None:
        return lambda fn: ShardMapFunction(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check=check)
    return ShardMapFunction(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check=check)


class ShardMapFunction:
    """What `shard_map` returns."""

    def __init__(
        self, fn: Callable[..., Any], *, mesh: AbstractMesh | None, in_specs: Any, out_specs: Any, check: bool
    ):
        functools.update_wrapper(self, fn, updated=())
        self.fn, self.mesh, self.in_specs, self.out_specs, self.check = fn, mesh, in_specs, out_specs, check
        name = getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__name__
        self.name = name.rsplit("<locals>.", 1)[-1]
        self.source = defined_at(fn) or self.name
        self._differentiable: dict[Any, tuple[OutsideFunction, list[Any]]] = {}

    @functools.cached_property
    def _jitted(self) -> JitFunction:
        return JitFunction(
            self,
            mesh=self.mesh,
            in_specs=None,
            out_specs=self.out_specs,
            donate_argnums=(),
            static_argnums=(),
            backend="graph",
            max_implicit_bytes=None,
        )

    def __call__(self, *args: Any) -> Any:
        trace = current_trace()
        if trace is None:
            return self._outside(args)
        source = user_source()
        self._check_place(trace, source)
        specs = self._argument_specs(args, source)
        region = Region(trace, self.name, self.check)
        with trace.marked(source=source):
            inside = [self._enter(region, arg, spec, i, source) for i, (arg, spec) in enumerate(zip(args, specs))]
        with region.active():
            result = self.fn(*inside)
            result = px_tree.map(trace.as_global, result)
        with trace.marked(source=source):
            return self._leave(region, result, source)

    def _outside(self, args: tuple) -> Any:
        """The call outside of any jit: a jitted step of its own."""
        refuse_aside(f"{self.name} is shard_mapped, and called", "call it around px.vmap, or write the batch dim out")
        leaves, treedef = px_tree.flatten(args)
        if tc.FakeTensor in set(map(type, leaves)):
            return self._shapes(args)
        if not any_differentiated(leaves):
            return self._jitted(*args)
        function = self._differentiable.get(treedef)
        if function is None:
            out_trees: list[Any] = []

            def flat(*given: Any) -> tuple[Any, ...]:
                outs, out_tree = px_tree.flatten(self(*px_tree.unflatten(treedef, list(given))))
                out_trees[:] = [out_tree]
                return tuple(outs)

            functools.update_wrapper(flat, self.fn, updated=())
            function = self._differentiable[treedef] = (OutsideFunction(flat, self.mesh), out_trees)
        outs = function[0](*(as_tensor(leaf) for leaf in leaves))
        return px_tree.unflatten(function[1][0], list(outs))

    def _shapes(self, args: tuple) -> Any:
        """The result's shapes, for `eval_shape`."""
        mesh = self.mesh or default_mesh([])
        like = px_tree.map(lambda leaf: ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype), args)
        with tc.unset_fake_temporarily():
            planned = ShardMapFunction(
                self.fn,
                mesh=AbstractMesh(mesh.shape),
                in_specs=self.in_specs,
                out_specs=self.out_specs,
                check=self.check,
            )
            graph = planned._jitted.trace(*like).graphs[0]
        return px_tree.unflatten(graph.out_tree, [torch.empty(o.shape, dtype=o.dtype) for o in graph.outputs])

    def _check_place(self, trace: TraceContext, source: str) -> None:
        if trace.region is not None:
            raise TraceError(
                f"shard_map of {self.name} inside {trace.region.name}, which is shard_mapped itself",
                source=source,
                fix="call the function itself: its values are one rank's already",
            )
        if self.mesh is not None and not trace.mesh.covers(self.mesh):
            raise MeshError(
                f"{self.name} is shard_mapped over another mesh than {trace.name} runs on",
                got=str(self.mesh),
                expected=str(trace.mesh),
                source=source,
                fix="leave out mesh=, or jit both for one mesh",
            )

    def _argument_specs(self, args: tuple, source: str) -> tuple:
        if not isinstance(self.in_specs, tuple):
            return (self.in_specs,) * len(args)
        if len(self.in_specs) != len(args):
            raise TreeError(
                f"{self.name} was called with {len(args)} arguments",
                got=f"in_specs for {len(self.in_specs)}",
                fix="give in_specs one entry an argument",
            )
        return self.in_specs

    def _enter(self, region: Region, arg: Any, spec: SpecTree, position: int, source: str) -> Any:
        """An argument as the body gets it."""
        trace, root = region.trace, f"argument {position} of {self.name}"
        pairs, treedef = px_tree.flatten_with_path(arg)
        leaves = []
        for (path, leaf), wanted in zip(pairs, spread(spec, arg, root)):
            where = px_tree.path_expr(path, root)
            with trace.marked(asked=True, reason=f"in_specs of {where}"):
                value = place_inside(leaf, wanted, where, trace)
            own = wanted if wanted is not None else spec_of_placements(value.placements, region.axis_names, value.ndim)
            check_spec(own, trace.mesh, value.shape, where, even=True)
            with tc.DisableTorchFunction():
                region.given.update(dict.fromkeys(storages(value), where))
            inside = region.to_shard(value, region.relations(own))
            if not self.check:
                inside = varying(inside, region, region.axis_names, source)
            leaves.append(inside)
        return px_tree.unflatten(treedef, leaves)

    def _leave(self, region: Region, result: Any, source: str) -> Any:
        """The body's result as a global value; every leaf that does not fit its spec is told."""
        pairs, treedef = px_tree.flatten_with_path(result)
        specs = spread(self.out_specs, result, "result")
        problems, leaves = [], []
        for (path, leaf), spec in zip(pairs, specs):
            where = px_tree.path_expr(path, "result")
            problem = self._misfit(region, leaf, spec, where)
            if problem is None:
                assert spec is not None
                leaves.append(self._leaf_out(region, leaf, spec, source))
            else:
                problems.append(problem)
        if problems:
            raise SpecError(
                f"{self.name} ({self.source}): "
                + (
                    "\n    ".join(["out_specs do not fit:", *(p.problem for p in problems)])
                    if len(problems) > 1
                    else problems[0].problem
                ),
                got=problems[0].got,
                expected=problems[0].expected,
                fix=problems[0].fix,
                source=source,
            )
        return px_tree.unflatten(treedef, leaves)

    def _misfit(self, region: Region, leaf: DTensor, spec: PartitionSpec | None, where: str) -> SpecError | None:
        if spec is None:
            return SpecError(
                f"{where} has no spec", fix="say in out_specs how the ranks' parts make a whole: P('data')"
            )
        unknown = [axis for axis in (*spec.axes, *spec.unreduced) if axis not in region.sizes]
        if unknown or (len(spec) > leaf.ndim and any(spec.entries[leaf.ndim :])):
            return SpecError(
                f"{where}: {spec} does not fit a value of {leaf.ndim} dims on {region.trace.mesh}",
                got=f"shape {tuple(leaf.shape)} on each rank",
                fix="one entry a dim; a scalar of each rank's own needs a dim to be joined along: x[None]",
            )
        if not self.check:
            return None
        placements = dict(zip(region.axis_names, relation(leaf)))
        named = (*spec.axes, *spec.unreduced)
        varies = [axis for axis, p in placements.items() if axis not in named and not p.is_replicate()]
        if varies:
            owed = any(placements[axis].is_partial() for axis in varies)
            shown = repr(varies[0]) if len(varies) == 1 else repr(tuple(varies))
            what = "is a sum that is still owed" if owed else "varies"
            return SpecError(
                f"{where}: {spec} says that the value is the same along {', '.join(map(repr, varies))}, but it {what}",
                got=f"{describe(leaf)} on each rank, {_told(placements)}",
                expected=f"the same value on every rank along {shown}",
                fix=f"return px.psum(x, {shown}), px.pmean or px.all_gather of it, or name the axis in its out_spec "
                f"({_suggested(spec, varies, leaf.ndim)})",
            )
        unpaid = [axis for axis in spec.axes if placements[axis].is_partial()]
        if unpaid:
            return SpecError(
                f"{where}: {spec} joins along {unpaid[0]!r} what is an addend of a sum that is owed there",
                got=_told(placements),
                fix=f"pay it with px.psum_scatter(x, {unpaid[0]!r}, tiled=True), or write unreduced=({unpaid[0]!r},)",
            )
        same = [axis for axis in spec.unreduced if placements[axis].is_replicate()]
        if same:
            return SpecError(
                f"{where} owes no sum over {same}",
                got=_told(placements),
                fix="leave the axes out of unreduced=; only what varies can be an addend",
            )
        return None

    def _leaf_out(self, region: Region, leaf: DTensor, spec: PartitionSpec, source: str) -> Any:
        shape = list(leaf.shape)
        for dim, entry in enumerate(spec.entries):
            for axis in axes_of(entry):
                shape[dim] *= region.sizes[axis]
        check_spec(spec, region.trace.mesh, shape, f"{self.name}: out_specs")
        axes = [*spec.axes, *spec.unreduced]
        if not self.check:
            leaf = varying(leaf, region, region.axis_names, source)
            others = tuple(axis for axis in region.axis_names if axis not in axes)
            leaf = apply(Claim(others), leaf, region, f"{self.name}'s result", source) if others else leaf
        leaf = varying(leaf, region, spec.axes, source)
        owing = [a for a in spec.unreduced if not relation(leaf)[region.axis_names.index(a)].is_partial()]
        leaf = unreduced(leaf, region, owing, source) if owing else leaf
        return region.to_global(leaf, trace_placements(spec, region.trace.mesh), shape)


def _told(placements: dict[str, Any]) -> str:
    """How ranks' values are related, in words."""
    kinds = {"varying": [], "unreduced": [], "the same": []}  # type: dict[str, list[str]]
    for axis, p in placements.items():
        kinds["the same" if p.is_replicate() else "unreduced" if p.is_partial() else "varying"].append(axis)
    return ", ".join(f"{kind} along {', '.join(axes)}" for kind, axes in kinds.items() if axes)


def _suggested(spec: PartitionSpec, axes: Sequence[str], ndim: int) -> str:
    if ndim == 0:
        return f"after x[None]: {P(tuple(axes))}"
    entries = [*spec.entries, *[None] * (ndim - len(spec))]
    entries[0] = (*axes_of(entries[0]), *axes)
    return str(P(*entries, unreduced=spec.unreduced))
