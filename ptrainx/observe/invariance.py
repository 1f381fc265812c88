"""Is a function the same program on every mesh? Its values and its gradients are compared with those of one device.

In: a function and plain arguments. Out: nothing, or an error that names the first operation that departs. To find it,
the function runs once more with every call of a torch function watched (`watched_calls`), on one device and on the
mesh; the watched values come out of the step as results of their own, and are compared rank by rank, in the order in
which they were made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ptrainx.compile.graph import origin_of, output_node
from ptrainx.core import tree as px_tree
from ptrainx.core.avals import as_tensor, describe, is_array_like
from ptrainx.mesh.mesh import Mesh, make_mesh
from ptrainx.mesh.partition_spec import PartitionSpec
from ptrainx.mesh.placement import is_first_owed, local_block, spec_of
from ptrainx.mesh.simulated import local_tensors
from ptrainx.mesh.spec_tree import SpecTree, spread
from ptrainx.mesh.transfer import device_get, device_put
from ptrainx.observe.watched_calls import Watched, WatchedCalls
from ptrainx.transforms.grad import value_and_grad
from ptrainx.transforms.jit import jit

__all__ = ["Departure", "InvarianceError", "assert_mesh_invariant"]


@dataclasses.dataclass(frozen=True)
class Departure:
    """Where a value on a mesh is not what it is on one device.

    Attributes:
        operation: the torch function that made it; "" for a result of the whole.
        source: `file:line` of the call.
        layer: the path of the parameter that the operation serves, "" if none.
        backward: whether the backward of the operation made it.
        rank: the first rank whose part is wrong; None where no rank's part is one by itself (a sum that is owed).
        index: of the first element, in the global value; () for a value of another shape or dtype.
        got: the element there, or the shape and dtype.
        expected: that of one device.
    """

    operation: str
    source: str
    layer: str
    backward: bool
    rank: int | None
    index: tuple[int, ...]
    got: str
    expected: str

    def __str__(self) -> str:
        layer = f", layer {self.layer}" if self.layer else ""
        phase = "the backward of " if self.backward else ""
        rank = f", rank {self.rank}" if self.rank is not None else ""
        index = f", index {list(self.index)}" if self.index else ""
        where = f" at {self.source}" if self.source else ""
        return f"{phase}{self.operation}{where}{layer}{rank}{index}: {self.got}, on one device {self.expected}"


class InvarianceError(AssertionError):
    """A function that gives on a mesh what it does not give on one device.

    Args:
        problem: the mesh, the result, by how much.
        departure: the first operation that departs, None if each of them, watched, gives the right value.
    """

    def __init__(self, problem: str, departure: Departure | None):
        self.problem, self.departure = problem, departure
        first = (
            f"first operation that departs: {departure}"
            if departure
            else "no operation departs when all of them are watched: run it with PTRAINX_CHECK_PASSES=1"
        )
        super().__init__(f"{problem}\n  {first}")


def assert_mesh_invariant(
    fn: Callable[..., Any],
    args: tuple,
    meshes: Iterable[Mapping[str, int]],
    in_specs: SpecTree = None,
    out_specs: SpecTree = None,
    *,
    rtol: float = 2e-5,
    atol: float = 1e-6,
    gradients: bool | None = None,
    backend: str = "graph",
) -> None:
    """Checks that a function gives on every mesh what it gives on one device, values and gradients.

    The gradients are those of the floating-point arguments, for fixed random cotangents of the floating-point results:
    the result need not be a scalar.

    Args:
        fn: a function as `px.jit` takes it.
        args: its arguments, plain values.
        meshes: axis sizes of the meshes to try; each is simulated in this process.
        in_specs: as for `px.jit`; axes that a mesh lacks are an error. An argument whose spec has `unreduced` axes is
            placed first, in addends that differ, since a plain value owes no sum.
        out_specs: as for `px.jit`.
        rtol: relative tolerance, for the rounding of reductions.
        atol: absolute tolerance, for values whose largest element is of order one; it grows with that.
        gradients: whether to compare gradients; by default, unless the function differentiates something itself, as a
            training step does.
        backend: as for `px.jit`.

    Raises:
        InvarianceError: an `AssertionError` that names the mesh, the result and the largest difference, and the first
            operation that departs: its source line, layer, rank and index.

    >>> from ptrainx import P
    >>> assert_mesh_invariant(lambda x: (x * x).sum(), (torch.arange(8.0),), [{"data": 2}, {"data": 4}], P("data"))
    """
    program = _Program(fn, args, gradients)
    want = program(*args, cotangents=program.cotangents)
    for axes in meshes:
        mesh = make_mesh(axes, simulate=True)
        specs = {"result": out_specs, "gradient": None}
        jitted = jit(program, mesh=mesh, in_specs=in_specs, out_specs=specs, backend=backend)
        given = _with_owed_sums(args, in_specs, mesh)
        problem = _compare(jitted(*given, cotangents=program.cotangents), want, mesh, rtol, atol)
        if problem is not None:
            raise InvarianceError(problem, _first_departure(program, args, mesh, in_specs, rtol, atol))


def _with_owed_sums(args: tuple, in_specs: SpecTree, mesh: Mesh) -> tuple:
    """The arguments, those placed that owe a sum by their spec."""
    pairs, treedef = px_tree.flatten_with_path(args)
    specs = spread(in_specs, args)
    return px_tree.unflatten(
        treedef,
        [_in_addends(leaf, spec, mesh) if spec and spec.unreduced else leaf for (_, leaf), spec in zip(pairs, specs)],
    )


def _in_addends(leaf: Any, spec: PartitionSpec, mesh: Mesh) -> Any:
    """A value as a sum that is owed. No addend of a float is zero: a function of each addend is not one of the sum."""
    value = as_tensor(leaf)
    placed = device_put(value, spec, mesh)
    others = math.prod(mesh.shape[axis] for axis in spec.unreduced) - 1
    if others and _is_float(value):
        for rank, part in local_tensors(placed).items():
            weight = 2.0 if is_first_owed(spec, mesh, rank) else -1.0 / others
            part.copy_(value[local_block(spec, mesh, value.shape, rank)] * weight)
    return placed


class _Program:
    """The function with its gradients, with and without a mesh: gives {"result": ..., "gradient": ...}."""

    def __init__(self, fn: Callable[..., Any], args: tuple, gradients: bool | None):
        functools.update_wrapper(self, fn, updated=())
        self.fn = fn
        watch = WatchedCalls()
        with watch:
            result = fn(*args)
        leaves = [as_tensor(leaf) for leaf in px_tree.leaves(result) if is_array_like(leaf)]
        wanted = not watch.differentiates if gradients is None else gradients
        self.cotangents = [_cotangent(i, leaf) for i, leaf in enumerate(leaves) if _is_float(leaf)] if wanted else []

    def __call__(self, *args: Any, cotangents: list[torch.Tensor], watch: WatchedCalls | None = None) -> dict[str, Any]:
        pairs, treedef = px_tree.flatten_with_path(args)
        floats = {i: as_tensor(leaf) for i, (_, leaf) in enumerate(pairs) if is_array_like(leaf) and _is_float(leaf)}
        if not cotangents or not floats:
            return {"result": self._run(args, watch), "gradient": {}}
        names = {i: _called(self.fn, pairs[i][0]) for i in floats}

        def weighed(by_name: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
            leaves = [by_name[names[i]] if i in floats else leaf for i, (_, leaf) in enumerate(pairs)]
            if watch is not None:
                for name, leaf in by_name.items():
                    watch.argument(name, leaf)
            result = self._run(px_tree.unflatten(treedef, leaves), watch)
            outs = [leaf for leaf in px_tree.leaves(result) if is_array_like(leaf) and _is_float(leaf)]
            products = [_product(as_tensor(out), cotangent) for out, cotangent in zip(outs, cotangents)]
            total = products[0]
            for product in products[1:]:
                total = total + product
            return total, result

        (_, result), gradient = value_and_grad(weighed, has_aux=True)({names[i]: x for i, x in floats.items()})
        return {"result": result, "gradient": gradient}

    def _run(self, args: tuple, watch: WatchedCalls | None) -> Any:
        with watch if watch is not None else contextlib.nullcontext():
            return self.fn(*args)


def _is_float(leaf: Any) -> bool:
    value = as_tensor(leaf)
    return value.is_floating_point() or value.is_complex()


def _called(fn: Any, path: Sequence[Any]) -> str:
    """An argument's leaf as rules match it, with the name of the argument."""
    code = getattr(fn, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    first = names[path[0]] if path[0] < len(names) else str(path[0])
    return px_tree.path_str((first, *path[1:]))


def _cotangent(index: int, out: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    real = torch.empty(0, dtype=out.dtype).real.dtype
    drawn = torch.rand(out.shape, generator=generator, dtype=torch.float64).add(0.5)
    signs = torch.randint(0, 2, out.shape, generator=generator) * 2 - 1
    return (drawn * signs).to(real)


def _product(out: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
    """The real part's product with the cotangent, and for a complex value the imaginary part's."""
    if out.is_complex():
        return (out.real * cotangent).sum() + (out.imag * cotangent).sum()
    return (out * cotangent).sum()


def _compare(result: dict[str, Any], want: dict[str, Any], mesh: Mesh, rtol: float, atol: float) -> str | None:
    """What is wrong with a result, one line."""
    if px_tree.structure(result) != px_tree.structure(want):
        return f"on {mesh} the result has another structure: {px_tree.structure(result['result'])}"
    for kind in ("result", "gradient"):
        pairs, _ = px_tree.flatten_with_path(result[kind])
        for (path, got), expected in zip(pairs, px_tree.leaves(want[kind])):
            name = px_tree.path_expr(path, "result") if kind == "result" else f"the gradient of {path[0]}"
            found = _difference(got, as_tensor(expected), mesh, rtol, atol)
            if found is not None:
                whole, expected = device_get(got), as_tensor(expected)
                if not found.index and (whole.shape, whole.dtype) != (expected.shape, expected.dtype):
                    return f"on {mesh} {name} is {found.got}, on one device {found.expected}"
                rank = f" on rank {found.rank}" if found.rank is not None else ""
                return (
                    f"on {mesh} {name} differs by up to {found.worst:.3g} from one device{rank} "
                    f"(rtol {rtol:g}, atol {atol:g})"
                )
    return None


@dataclasses.dataclass(frozen=True)
class _Difference:
    rank: int | None
    index: tuple[int, ...]
    got: str
    expected: str
    worst: float


def _difference(got: Any, want: torch.Tensor, mesh: Mesh, rtol: float, atol: float) -> _Difference | None:
    """Where a value on the mesh, each rank's part by itself, is not what it should be."""
    if tuple(got.shape) != tuple(want.shape) or got.dtype != want.dtype:
        return _Difference(None, (), describe(got), describe(want), float("inf"))
    parts: list[tuple[int | None, torch.Tensor, tuple[slice, ...]]]
    if not isinstance(got, DTensor) or any(p.is_partial() for p in got.placements):
        parts = [(None, device_get(got), tuple(slice(0, n) for n in want.shape))]
    else:
        spec = spec_of(got)
        parts = [(rank, part, local_block(spec, mesh, want.shape, rank)) for rank, part in local_tensors(got).items()]
    largest = _largest(want)
    for rank, part, block in parts:
        expected = want.detach()[block]
        if part.shape != expected.shape:
            return _Difference(rank, (), describe(part), describe(expected), float("inf"))
        close = torch.isclose(part, expected, rtol=rtol, atol=atol * max(1.0, largest), equal_nan=True)
        if not bool(close.all()):
            at = tuple((~close).nonzero()[0].tolist())
            index = tuple(i + (s.start or 0) for i, s in zip(at, block))
            kind = torch.complex128 if part.is_complex() else torch.float64
            worst = float(torch.nan_to_num((part.to(kind) - expected.to(kind)).abs(), float("inf")).max())
            return _Difference(rank, index, repr(part[at].item()), repr(expected[at].item()), worst)
    return None


def _largest(value: torch.Tensor) -> float:
    """The largest finite magnitude of an element."""
    if not value.numel() or not _is_float(value):
        return 0.0
    return float(torch.nan_to_num(value.detach().abs().double(), 0, 0, 0).max())


def _first_departure(
    program: _Program, args: tuple, mesh: Mesh, in_specs: SpecTree, rtol: float, atol: float
) -> Departure | None:
    """Runs the function with its calls watched, on one device and on the mesh, and compares them in order."""
    alone, traced_calls = WatchedCalls(), WatchedCalls()
    program(*args, cotangents=program.cotangents, watch=alone)

    @functools.wraps(program.fn)
    def watched(*args: Any, cotangents: list[torch.Tensor]) -> list[torch.Tensor]:
        calls = WatchedCalls()
        program(*args, cotangents=cotangents, watch=calls)
        traced_calls.watched = calls.watched  # the same for every rank
        return [_with_a_dim(entry.value) for entry in calls.watched]

    given = _with_owed_sums(args, in_specs, mesh)
    traced = jit(watched, mesh=mesh, in_specs=in_specs).trace(*given, cotangents=program.cotangents)
    results = traced.lower().compile()(*given, cotangents=program.cotangents)
    nodes: Any = output_node(traced.graphs[0].module.graph).args[0]
    for i, entry in traced_calls.matched(alone.watched):
        found = _difference(results[i], _with_a_dim(entry.value), mesh, rtol, atol)
        if found is not None:
            return _departure(traced_calls.watched[i], origin_of(nodes[i]).layer, found)
    return None


def _with_a_dim(value: torch.Tensor) -> torch.Tensor:
    """A 0-d value as one of one element: a step returns 0-d results of one rank only."""
    return value.reshape(1) if value.ndim == 0 else value


def _departure(entry: Watched, layer: str, found: _Difference) -> Departure:
    index = found.index if entry.value.ndim else ()
    owed = isinstance(entry.value, DTensor) and any(p.is_partial() for p in entry.value.placements)
    rank = None if owed else found.rank
    if not entry.backward:
        return Departure(entry.name, entry.source, layer, False, rank, index, found.got, found.expected)
    # The gradient of a value is made by the backward of what has read it.
    names = " or ".join(dict.fromkeys(name for name, _ in entry.readers)) or entry.name
    sources = ", ".join(dict.fromkeys(source for _, source in entry.readers)) or entry.source
    return Departure(names, sources, layer, True, rank, index, found.got, found.expected)
