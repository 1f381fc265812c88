"""`grad` and `value_and_grad`: reverse-mode derivatives of pure functions of pytrees.

They work on plain tensors, on placed values, and inside a jitted step, and they nest. Over placed values a gradient
comes back at its argument's placement with its sums paid; those collectives count as asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.attention import SDPBackend, sdpa_kernel

from ptrainx.core import torch_compat as tc
from ptrainx.core import tree as px_tree
from ptrainx.core.avals import as_tensor, describe
from ptrainx.core.errors import GradientError
from ptrainx.core.reductions import reductions_asked_for, widest
from ptrainx.core.trace_context import current_trace, one_more_grad, open_grads, user_source

__all__ = ["GradFunction", "any_differentiated", "grad", "value_and_grad"]


def value_and_grad(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, reduce: bool = True
) -> GradFunction:
    """A function that returns `fn`'s value and its gradient.

    Args:
        fn: returns a scalar, or (scalar, aux) with `has_aux`.
        argnums: which positional arguments to differentiate; each a pytree of floating-point tensors.
        has_aux: `fn` returns (value, aux); aux is any pytree, passed through.
        reduce: pay the sums that gradients owe over mesh axes. False leaves them unreduced (DTensor's Partial), for
            compression and deferred reduction.

    Returns:
        called like `fn`, gives (value, gradient), or ((value, aux), gradient). The gradient has the structure of the
        argument (a tuple of them for several argnums). A leaf that the value does not depend on gets zeros.

    Raises:
        GradientError: the value is no floating-point scalar; a differentiated leaf is not floating-point.

    >>> value_and_grad(lambda x: (x * x).sum())(torch.tensor([3.0]))
    (tensor(9.), tensor([6.]))
    """
    return GradFunction(fn, argnums, has_aux, reduce, with_value=True)


def grad(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, reduce: bool = True
) -> GradFunction:
    """A function that returns `fn`'s gradient, or (gradient, aux) with `has_aux`; see `value_and_grad`.

    >>> grad(grad(lambda x: x**3))(torch.tensor(2.0))
    tensor(12.)
    """
    return GradFunction(fn, argnums, has_aux, reduce, with_value=False)


class GradFunction:
    """What `grad` and `value_and_grad` return: a callable that knows how to leave its sums unpaid.

    `accumulate_grads` uses `unreduced` in its loop and `pay` once after it.
    """

    def __init__(self, fn: Any, argnums: int | Sequence[int], has_aux: bool, reduce: bool, with_value: bool):
        functools.update_wrapper(self, fn, updated=())
        self.fn, self.has_aux, self.reduce, self.with_value = fn, has_aux, reduce, with_value
        self.single = isinstance(argnums, int)
        self.argnums: tuple[int, ...] = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        self._parameters = _parameter_names(fn)
        self._summed_in: torch.dtype | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value, aux, grads = self.unreduced(*args, **kwargs)
        if self.reduce:
            grads = self.pay(grads, args)
        return self.package(value, aux, grads)

    def package(self, value: Any, aux: Any, grads: tuple) -> Any:
        """The result in the form that the caller expects."""
        gradient = grads[0] if self.single else grads
        if not self.with_value:
            return (gradient, aux) if self.has_aux else gradient
        return ((value, aux) if self.has_aux else value), gradient

    def unreduced(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, tuple]:
        """(value, aux or None, one gradient an argnum), sums over mesh axes still owed.

        Where a precision policy asks for sums in a wider dtype than a gradient's, the gradient has that one.
        """
        selected = tuple(self._argument(args, i) for i in self.argnums)
        pairs, treedef = px_tree.flatten_with_path(selected)
        inputs = [self._input(leaf, path) for path, leaf in pairs]
        nested = open_grads() > 0 or (torch.is_grad_enabled() and any(_requires_grad(a) for a in (args, kwargs)))
        layers = [self._layer(path) for path, _ in pairs]
        primals = [_differentiable(x, nested, layer) for x, layer in zip(inputs, layers)]
        with (
            reductions_asked_for() as asked,
            _phase("forward"),
            torch.enable_grad(),
            one_more_grad(),
            _twice_differentiable(nested),
        ):
            call = list(args)
            for i, argument in zip(self.argnums, px_tree.unflatten(treedef, primals)):
                call[i] = argument
            out = self.fn(*call, **kwargs)
        value, aux = self._split(out)
        self._summed_in = widest(asked)
        with _phase("backward"):
            if (trace := current_trace()) is not None:
                trace.at_call(user_source())
            grads = _gradients(value, primals, nested)
            grads = [self._wide_enough(g) for g in grads]
            if not nested:
                grads = [_labelled(g, layer, "gradient") for g, layer in zip(grads, layers)]
        trace = current_trace()
        if trace is not None and open_grads() == 0:
            trace.set_origin(_replace_phase(trace.origin, "update"))
        if not nested:
            value, aux = px_tree.map(_detached, (value, aux))
        return value, aux, px_tree.unflatten(treedef, grads)

    def pay(self, grads: tuple, args: Sequence[Any]) -> tuple:
        """Gradients at their arguments' placements, all sums paid, and in their dtypes under a precision policy."""
        selected = tuple(self._argument(args, i) for i in self.argnums)

        def one(path: Any, gradient: Any, primal: Any) -> Any:
            trace = current_trace()
            where = px_tree.path_expr(path[1:], self._name(path[0]))
            origin = {"layer": self._layer(path), "role": "gradient", "phase": "backward"}
            with trace.marked(asked=True, reason=f"gradient of {where}", **origin) if trace else _nothing():
                paid = _paid(gradient, _resting_placements(primal, gradient), self._summed_in)
                return paid if self._summed_in is None else paid.to(as_tensor(primal).dtype)

        return px_tree.map_with_path(one, grads, selected)

    def _wide_enough(self, gradient: torch.Tensor) -> torch.Tensor:
        if self._summed_in is None:
            return gradient
        return gradient.to(torch.promote_types(gradient.dtype, self._summed_in))

    def _name(self, index: int) -> str:
        return f"argument {self.argnums[index]}"

    def _layer(self, path: Any) -> str:
        """How origins call the leaf: its path as rules match it, in the argument if there is but one."""
        argument = self.argnums[path[0]]
        name = self._parameters[argument] if argument < len(self._parameters) else str(argument)
        return px_tree.path_str(path[1:] if self.single and len(path) > 1 else (name, *path[1:]))

    def _argument(self, args: Sequence[Any], i: int) -> Any:
        try:
            return args[i]
        except IndexError:
            raise GradientError(
                f"argnums={i}, but {_called(self.fn)} was called with {len(args)} positional arguments",
                fix="pass differentiated arguments by position",
            ) from None

    def _input(self, leaf: Any, path: Any) -> torch.Tensor:
        where = px_tree.path_expr(path[1:], self._name(path[0]))
        x = as_tensor(leaf, where)
        if not (x.is_floating_point() or x.is_complex()):
            raise GradientError(
                f"gradient of {_called(self.fn)} with respect to integers: {where}",
                got=describe(x),
                expected="floating-point leaves",
                fix="choose other argnums, or keep integer leaves in an argument of their own",
                source=user_source(),
            )
        return x

    def _split(self, out: Any) -> tuple[Any, Any]:
        aux = None
        if self.has_aux:
            if not isinstance(out, tuple) or len(out) != 2:
                raise GradientError(
                    f"{_called(self.fn)} does not return a pair (value, aux)",
                    got=type(out).__name__,
                    fix="return (loss, aux), or leave out has_aux",
                )
            out, aux = out
        if not isinstance(out, torch.Tensor) or out.ndim != 0:
            raise GradientError(
                f"gradient of {_called(self.fn)}, which does not return a scalar",
                got=describe(out) if isinstance(out, torch.Tensor) else type(out).__name__,
                expected="a 0-d floating-point tensor",
                fix="reduce it with .mean() or .sum()" + ("" if self.has_aux else ", or use has_aux=True"),
                source=user_source(),
            )
        if not out.is_floating_point():
            raise GradientError(
                f"gradient of {_called(self.fn)}, whose value is not floating-point",
                got=describe(out),
                fix="return a real floating-point loss",
            )
        return out, aux


def _gradients(value: torch.Tensor, primals: list[torch.Tensor], nested: bool) -> list[torch.Tensor]:
    if not value.requires_grad:
        return [torch.zeros_like(p).detach() for p in primals]
    with tc.DisableTorchFunction() if current_trace() else _nothing():
        found = torch.autograd.grad(value, primals, create_graph=nested, allow_unused=True)
    return [torch.zeros_like(p).detach() if g is None else g for p, g in zip(primals, found)]


def _resting_placements(primal: Any, gradient: Any) -> tuple:
    if isinstance(primal, DTensor):
        # The gradient of a sum that is owed is the same for every addend.
        return tuple(Replicate() if p.is_partial() else p for p in primal.placements)
    mesh_dims = gradient.device_mesh.ndim if isinstance(gradient, DTensor) else 0
    return (Replicate(),) * mesh_dims


def _paid(gradient: Any, wanted: tuple, summed_in: torch.dtype | None) -> Any:
    """A gradient at other placements; what is summed on the way is summed in a dtype, if one is given."""
    if not isinstance(gradient, DTensor) or tuple(gradient.placements) == wanted:
        return gradient
    if summed_in is not None and any(placement.is_partial() for placement in gradient.placements):
        gradient = gradient.to(summed_in)
    return gradient.redistribute(gradient.device_mesh, wanted)


def _differentiable(x: torch.Tensor, nested: bool, layer: str) -> torch.Tensor:
    if nested and x.requires_grad:
        with torch.enable_grad():
            return x.clone()
    return _labelled(x, layer, "parameter").requires_grad_()


def _labelled(x: torch.Tensor, layer: str, role: str) -> torch.Tensor:
    """The value, detached; the node that this makes in a trace tells what the value is."""
    trace = current_trace()
    with trace.marked(layer=layer, role=role) if trace is not None else _nothing():
        return x.detach()


def _parameter_names(fn: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        return ()


def any_differentiated(leaves: Sequence[Any]) -> bool:
    """Whether a `grad` that is running outside of any jit differentiates by one of these leaves."""
    return open_grads() > 0 and _requires_grad(leaves)


def _requires_grad(tree: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in px_tree.leaves(tree))


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _called(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or repr(fn)


def _replace_phase(origin: Any, phase: str) -> Any:
    return dataclasses.replace(origin, phase=phase)


def _nothing() -> Any:
    return contextlib.nullcontext()


def _phase(name: str) -> Any:
    trace = current_trace()
    return trace.marked(phase=name) if trace is not None else _nothing()


def _twice_differentiable(nested: bool) -> Any:
    """Attention's fused CPU kernel has no second derivative; its math form has."""
    return sdpa_kernel(SDPBackend.MATH) if nested else _nothing()
