"""A function of global values that is called outside of any jit, by something that differentiates it.

The call is a jitted step; so is its backward, which runs the function again to differentiate it. The backward is such a
function itself, so that it can be differentiated in turn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ptrainx.core.trace_context import no_open_grads
from ptrainx.mesh.mesh import AbstractMesh
from ptrainx.transforms.grad import GradFunction
from ptrainx.transforms.jit import JitFunction

__all__ = ["OutsideFunction"]

Function = Callable[..., tuple[Any, ...]]


class OutsideFunction:
    """A function from tensors to a tuple of tensors, as a step of autograd outside of any jit.

    Args:
        fn: pure, of global values.
        mesh: as for `jit`.
    """

    def __init__(self, fn: Function, mesh: AbstractMesh | None):
        self.fn, self.mesh = fn, mesh
        options: dict[str, Any] = {"mesh": mesh, "in_specs": None, "out_specs": None, "max_implicit_bytes": None}
        self.jitted = JitFunction(fn, donate_argnums=(), static_argnums=(), backend="graph", **options)

    def __call__(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outs: tuple[torch.Tensor, ...] = _Call.apply(self, *leaves)
        return outs

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def gradient(self, wanted: tuple[int, ...], outs: tuple[int, ...], n_leaves: int) -> OutsideFunction:
        """`(*leaves, *cotangents of the results `outs`) -> gradients of the leaves `wanted``."""

        def gradients(*given: Any) -> tuple[Any, ...]:
            leaves, cotangents = list(given[:n_leaves]), given[n_leaves:]

            def along(chosen: list[Any]) -> Any:
                for i, value in zip(wanted, chosen):
                    leaves[i] = value
                results = self.fn(*leaves)
                return sum((results[j] * c).sum() for j, c in zip(outs, cotangents))

            return tuple(GradFunction(along, 0, False, True, with_value=False)([leaves[i] for i in wanted]))

        functools.update_wrapper(gradients, self.fn, updated=())
        return OutsideFunction(gradients, self.mesh)


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: OutsideFunction, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with no_open_grads():
            results = function.jitted(*(leaf.detach() for leaf in leaves))
        ctx.function = function
        ctx.wanted = tuple(i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed)
        ctx.outs = tuple(j for j, out in enumerate(results) if out.is_floating_point())
        ctx.mark_non_differentiable(*(out for out in results if not out.is_floating_point()))
        ctx.save_for_backward(*leaves)
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        leaves = ctx.saved_tensors
        gradient = ctx.function.gradient(ctx.wanted, ctx.outs, len(leaves))
        found = iter(gradient(*leaves, *(cotangents[j] for j in ctx.outs)))
        return None, *(_like(next(found), leaf) if i in ctx.wanted else None for i, leaf in enumerate(leaves))


def _like(gradient: Any, leaf: torch.Tensor) -> torch.Tensor:
    """The gradient of a plain leaf is a plain tensor."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) and not isinstance(leaf, DTensor) else gradient
