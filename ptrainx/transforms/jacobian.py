"""`vjp`, `jvp` and `hvp`: products of vectors and matrices of derivatives, without the matrices.

Like `grad` they work on plain tensors, on placed values and inside a jitted step, and compose with it and with each
other. Over placed values a gradient comes back at its argument's placement, and a tangent at its result's.

`jvp` is two reverse passes: the gradient J^T v is linear in v, and the derivative of <J^T v, t> by v is J t. So every
operator that can be differentiated twice has a forward derivative, on DTensors too, which torch's forward mode does not
know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.attention import SDPBackend, sdpa_kernel

from ptrainx.core import torch_compat as tc
from ptrainx.core import tree as px_tree
from ptrainx.core.avals import as_tensor, describe
from ptrainx.core.errors import GradientError, TraceError, TreeError
from ptrainx.core.trace_context import current_trace, one_more_grad, open_grads, user_source
from ptrainx.transforms.grad import GradFunction

__all__ = ["hvp", "jvp", "vjp"]


def vjp(fn: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """The value of a function, and the function that multiplies a vector with its Jacobian from the left.

    Args:
        fn: from pytrees of floating-point tensors to a pytree of them, or with `has_aux` to (such a pytree, aux).
        primals: its arguments.
        has_aux: `fn` returns (value, aux); aux is any pytree, passed through.

    Returns:
        (value, vjp_fn), or (value, vjp_fn, aux). `vjp_fn(cotangents)`, given a tree like the value, returns a tuple:
        for each primal the gradient of <value, cotangents>. It may be called again, inside the step that made it.

    Raises:
        GradientError: a leaf of a primal or of the value is no real floating-point tensor; cotangents of other shapes.
        TreeError: cotangents of another structure.

    >>> value, vjp_fn = vjp(lambda x, y: x * y, torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    >>> vjp_fn(torch.tensor([1.0, 10.0]))
    (tensor([ 3., 40.]), tensor([ 1., 20.]))
    """
    run = _Run("px.vjp", fn, primals, has_aux, again=False)

    def vjp_fn(cotangents: Any) -> tuple[Any, ...]:
        given = run.like_value(cotangents, "cotangents")
        differentiated = run.nested or open_grads() > 0 or any(c.requires_grad for c in given)
        found = run.pullback(given, create_graph=differentiated)
        grads = [
            _placed(torch.zeros_like(x).detach() if g is None else g, x, run, "gradient")
            for g, x in zip(found, run.inputs)
        ]
        return px_tree.unflatten(run.treedef, grads)

    return (run.value, vjp_fn, run.aux) if has_aux else (run.value, vjp_fn)


def jvp(fn: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False) -> Any:
    """The value of a function, and its derivative along tangents: the Jacobian times a vector.

    Args:
        fn: from pytrees of floating-point tensors to a pytree of them, or with `has_aux` to (such a pytree, aux).
        primals: its arguments, a tuple.
        tangents: a tuple like them, of the same structures, shapes and dtypes.
        has_aux: `fn` returns (value, aux); aux is any pytree, passed through.

    Returns:
        (value, tangents of the value), or (value, tangents, aux).

    Raises:
        GradientError: a leaf that is no real floating-point tensor; tangents of other shapes or dtypes.
        TreeError: tangents of another structure.

    >>> jvp(torch.sin, (torch.tensor(0.0),), (torch.tensor(2.0),))
    (tensor(0.), tensor(2.))
    """
    primals, tangents = _tuples("px.jvp", primals, tangents)
    run = _Run("px.jvp", fn, primals, has_aux, again=True)
    directions = _matched("px.jvp: tangents", tangents, primals, run.paths, run.inputs)
    with run.differentiating():
        weights = [torch.zeros_like(y).requires_grad_() for y in run.outputs]
    gradients = run.pullback(weights, create_graph=True)
    paired = [(g, t) for g, t in zip(gradients, directions) if g is not None and g.requires_grad]
    along: Sequence[Any] = [None] * len(weights)
    if paired:
        created = run.nested or any(t.requires_grad for _, t in paired)
        along = run.derivative([g for g, _ in paired], weights, [t for _, t in paired], created)
    found = [
        _placed(torch.zeros_like(y).detach() if t is None else t, y, run, "tangent") for t, y in zip(along, run.outputs)
    ]
    tangent = px_tree.unflatten(run.out_tree, found)
    return (run.value, tangent, run.aux) if has_aux else (run.value, tangent)


def hvp(fn: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, ...]:
    """The Hessian of a scalar function times a vector.

    Args:
        fn: from pytrees of floating-point tensors to a 0-d one.
        primals: its arguments, a tuple.
        tangents: a tuple like them.

    Returns:
        a tuple like the primals: the derivative of `fn`'s gradient along the tangents.

    Raises:
        GradientError: as for `jvp` and `grad`.
        TreeError: tangents of another structure.

    >>> hvp(lambda x: (x**3).sum(), (torch.tensor([1.0, 2.0]),), (torch.tensor([1.0, 1.0]),))
    (tensor([ 6., 12.]),)
    """
    primals, tangents = _tuples("px.hvp", primals, tangents)
    _refuse_per_shard("px.hvp")
    every = tuple(range(len(primals)))
    pairs, _ = px_tree.flatten_with_path(primals)
    inputs = [_real("px.hvp", as_tensor(leaf), f"primals{px_tree.path_expr(path)}") for path, leaf in pairs]
    directions = _matched("px.hvp: tangents", tangents, primals, [path for path, _ in pairs], inputs)

    def along(*values: Any) -> Any:
        gradient = px_tree.leaves(GradFunction(fn, every, False, True, with_value=False)(*values))
        return sum((g * t).sum() for g, t in zip(gradient, directions))

    return tuple(GradFunction(along, every, False, True, with_value=False)(*primals))


class _Run:
    """One run of a function, ready to be differentiated.

    Attributes:
        value, aux: what it gave, for the caller.
        inputs: the leaves of its arguments, differentiated.
        outputs: the leaves of its value, with owed sums paid.
        nested: whether something around it differentiates too.
    """

    def __init__(self, name: str, fn: Callable[..., Any], primals: Sequence[Any], has_aux: bool, again: bool):
        self.name, self.again = name, again
        _refuse_per_shard(name)
        pairs, self.treedef = px_tree.flatten_with_path(tuple(primals))
        self.paths = [path for path, _ in pairs]
        trace = current_trace()
        leaves = [as_tensor(leaf) if trace is None else trace.as_global(leaf) for _, leaf in pairs]
        for path, leaf in zip(self.paths, leaves):
            _real(name, leaf, f"primals{px_tree.path_expr(path)}")
        self.nested = open_grads() > 0 or (torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves))
        with self.differentiating():
            self.inputs = [
                leaf.clone() if self.nested and leaf.requires_grad else leaf.detach().requires_grad_()
                for leaf in leaves
            ]
            out = fn(*px_tree.unflatten(self.treedef, self.inputs))
            if has_aux and not (isinstance(out, tuple) and len(out) == 2):
                raise GradientError(
                    f"{name}: the function does not return a pair (value, aux)",
                    got=type(out).__name__,
                    fix="return (value, aux), or leave out has_aux",
                    source=user_source(),
                )
            value, aux = out if has_aux else (out, None)
            self.aux: Any = aux
            found, self.out_tree = px_tree.flatten_with_path(value)
            made = [as_tensor(leaf) if trace is None else trace.as_global(leaf) for _, leaf in found]
            self.outputs = [
                _whole_sum(
                    _real(name, leaf, px_tree.path_expr(path, "the value"), "return it in aux with has_aux=True")
                )
                for (path, _), leaf in zip(found, made)
            ]
        self.value = px_tree.unflatten(self.out_tree, self.outputs)
        if not self.nested:
            self.value, self.aux = px_tree.map(
                lambda x: x.detach() if isinstance(x, torch.Tensor) else x, (self.value, self.aux)
            )

    @contextlib.contextmanager
    def differentiating(self) -> Iterator[None]:
        """Inside, operators are recorded so that they can be differentiated, or differentiated again."""
        twice = self.again or self.nested if hasattr(self, "nested") else self.again
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(one_more_grad())
            if twice:
                # Attention's fused CPU kernel has no second derivative; its math form has. Loops are unrolled.
                stack.enter_context(one_more_grad())
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            yield

    def pullback(self, cotangents: Sequence[torch.Tensor], create_graph: bool) -> Sequence[torch.Tensor | None]:
        """The gradients of <value, cotangents>; None where there is none."""
        chosen = [i for i, y in enumerate(self.outputs) if y.requires_grad]
        if not chosen:
            return [None] * len(self.inputs)
        outputs = [self.outputs[i] for i in chosen]
        return self.derivative(outputs, self.inputs, [cotangents[i] for i in chosen], create_graph)

    def derivative(
        self, of: Sequence[Any], by: Sequence[Any], along: Sequence[Any], create_graph: bool
    ) -> Sequence[torch.Tensor | None]:
        """`torch.autograd.grad`, which can be called again."""
        trace = current_trace()
        if trace is not None:
            trace.at_call(user_source())
        phase: Any = trace.marked(phase="backward") if trace is not None else contextlib.nullcontext()
        # The engine's own functions are none of the user's.
        quiet: Any = tc.DisableTorchFunction() if trace is not None else contextlib.nullcontext()
        with phase, quiet:
            return torch.autograd.grad(
                list(of), list(by), list(along), create_graph=create_graph, retain_graph=True, allow_unused=True
            )

    def like_value(self, tree: Any, what: str) -> list[Any]:
        """The leaves of a tree that has to be like the value."""
        value = px_tree.unflatten(self.out_tree, self.outputs)
        pairs, _ = px_tree.flatten_with_path(value)
        return _matched(f"{self.name}: {what}", tree, value, [path for path, _ in pairs], self.outputs)


def _refuse_per_shard(name: str) -> None:
    trace = current_trace()
    if trace is not None and trace.region is not None:
        raise TraceError(
            f"{name} inside {trace.region.name}, where values are per-shard ones",
            source=user_source(),
            fix="take it around px.shard_map, or use px.grad inside",
        )


def _real(name: str, leaf: torch.Tensor, where: str, fix: str = "close over it instead of passing it") -> torch.Tensor:
    if not leaf.is_floating_point():
        raise GradientError(
            f"{name}: {where} is not differentiable",
            got=describe(leaf),
            expected="real floating-point leaves",
            fix=fix,
            source=user_source(),
        )
    return leaf


def _tuples(name: str, primals: Any, tangents: Any) -> tuple[tuple, tuple]:
    for what, given in (("primals", primals), ("tangents", tangents)):
        if not isinstance(given, (tuple, list)):
            raise TreeError(
                f"{name}: {what} have to be a tuple, one entry an argument",
                got=type(given).__name__,
                fix=f"write ({what[:-1]},) for one argument",
            )
    return tuple(primals), tuple(tangents)


def _matched(where: str, tree: Any, like: Any, paths: Sequence[Any], leaves: Sequence[torch.Tensor]) -> list[Any]:
    """The leaves of a tree, each of the shape and dtype of the one that it goes with."""
    if px_tree.structure(tree) != px_tree.structure(like):
        raise TreeError(
            f"{where} have another structure",
            got=str(px_tree.structure(tree)),
            expected=str(px_tree.structure(like)),
            source=user_source(),
        )
    trace = current_trace()
    found = []
    for path, given, leaf in zip(paths, px_tree.leaves(tree), leaves):
        vector = as_tensor(given) if trace is None else trace.as_global(given)
        if (vector.shape, vector.dtype) != (leaf.shape, leaf.dtype):
            raise GradientError(
                f"{where}{px_tree.path_expr(path)}",
                got=describe(vector),
                expected=describe(leaf),
                source=user_source(),
            )
        found.append(_beside(vector, leaf))
    return found


def _beside(vector: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """A plain vector, outside of a jit, as a replicated value where the leaf that it goes with is placed."""
    if not isinstance(leaf, DTensor) or isinstance(vector, DTensor):
        return vector
    return torch.zeros_like(leaf) + vector


def _whole_sum(value: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, DTensor) or not any(p.is_partial() for p in value.placements):
        return value
    placements = [Replicate() if p.is_partial() else p for p in value.placements]
    trace = current_trace()
    marked: Any = contextlib.nullcontext()
    if trace is not None:
        marked = trace.marked(asked=True, reason="a sum owed in a differentiated value")
    with marked:
        return value.redistribute(value.device_mesh, placements)


def _placed(vector: torch.Tensor, leaf: torch.Tensor, run: _Run, what: str) -> torch.Tensor:
    """A gradient or tangent where the value that it belongs to is, owed sums paid."""
    if not run.nested and not vector.requires_grad:
        vector = vector.detach()
    if not isinstance(vector, DTensor):
        return vector
    # What goes with a sum that is owed is the same for every addend.
    placements: tuple[Any, ...] = (Replicate(),) * vector.device_mesh.ndim
    if isinstance(leaf, DTensor):
        placements = tuple(Replicate() if p.is_partial() else p for p in leaf.placements)
    if tuple(vector.placements) == placements:
        return vector
    trace = current_trace()
    marked: Any = contextlib.nullcontext()
    if trace is not None:
        marked = trace.marked(asked=True, reason=f"{what} of {run.name}", phase="backward")
    with marked:
        return vector.redistribute(vector.device_mesh, placements)
