"""Transformations made of transformations: one after another (`chain`), or on some leaves only (`masked`)."""

from __future__ import annotations

from typing import Any, NamedTuple

from ptrainx.core import tree
from ptrainx.core.errors import HyperparameterError, TreeError
from ptrainx.optim.base import GradientTransformation

__all__ = ["MaskedState", "chain", "masked", "require_transform"]


def chain(*transforms: GradientTransformation) -> GradientTransformation:
    """Applies transformations in order: the updates of each go into the next.

    Args:
        transforms: the links; none gives the identity.

    Returns:
        A transformation whose state is the tuple of the links' states.

    Raises:
        HyperparameterError: an argument is no transformation.
        TreeError: `update` got a state of another length.

    >>> import torch
    >>> from ptrainx.optim import clip, scale
    >>> both = chain(clip(1.0), scale(-0.1))
    >>> updates, state = both.update(torch.tensor([0.5, 3.0]), both.init(torch.zeros(2)))
    >>> updates
    tensor([-0.0500, -0.1000])
    """
    for position, transform in enumerate(transforms):
        require_transform(f"chain: argument {position}", transform)

    def init(params: Any) -> tuple:
        return tuple(transform.init(params) for transform in transforms)

    def update(updates: Any, state: tuple, params: Any = None) -> tuple[Any, tuple]:
        if not isinstance(state, tuple) or len(state) != len(transforms):
            raise TreeError(
                "chain.update: the state is not of this chain",
                got=f"a tuple of {len(state)}" if isinstance(state, tuple) else type(state).__name__,
                expected=f"a tuple of {len(transforms)} states, one a link",
                fix="make the state with the init of the same optimizer",
            )
        new_state = []
        for transform, old in zip(transforms, state):
            updates, new = transform.update(updates, old, params)
            new_state.append(new)
        return updates, tuple(new_state)

    return GradientTransformation(init, update)


class MaskedState(NamedTuple):
    """The state of a masked transformation.

    Attributes:
        inner_state: the inner state, over trees in which None stands for each leaf left out.
    """

    inner_state: Any


def masked(inner: GradientTransformation, mask: Any) -> GradientTransformation:
    """Applies `inner` to the leaves that `mask` marks; the updates of all others pass unchanged.

    The inner transformation sees trees with None, an empty node, in place of the leaves left out, so it keeps no state
    for them.

    Args:
        inner: the transformation.
        mask: a pytree of bools, of the parameters' structure or a prefix of it, or a function from the parameters to
            such a tree.

    Raises:
        HyperparameterError: `inner` is no transformation, or a leaf of the mask is no bool.
        TreeError: the mask is no prefix of the tree it is for.

    >>> import torch
    >>> from ptrainx.optim import scale
    >>> only_matrices = masked(scale(10.0), lambda params: tree.map(lambda p: p.ndim > 1, params))
    >>> grads = {"b": torch.ones(2), "w": torch.ones(1, 2)}
    >>> only_matrices.update(grads, only_matrices.init(grads), grads)[0]
    {'b': tensor([1., 1.]), 'w': tensor([[10., 10.]])}
    """
    require_transform("masked: inner", inner)
    if not callable(mask):
        _require_bools(mask)

    def marked(params: Any) -> Any:
        if not callable(mask):
            return mask
        found = mask(params)
        _require_bools(found)
        return found

    def keep(marks: Any, values: Any) -> Any:
        return None if values is None else tree.map(lambda m, value: value if m else None, marks, values)

    def init(params: Any) -> MaskedState:
        return MaskedState(inner.init(keep(marked(params), params)))

    def update(updates: Any, state: MaskedState, params: Any = None) -> tuple[Any, MaskedState]:
        marks = marked(updates if params is None else params)
        new, inner_state = inner.update(keep(marks, updates), state.inner_state, keep(marks, params))
        return tree.map(lambda m, new, old: new if m else old, marks, new, updates), MaskedState(inner_state)

    return GradientTransformation(init, update)


def require_transform(where: str, value: Any) -> None:
    """Refuses what is no pair of init and update."""
    if callable(getattr(value, "init", None)) and callable(getattr(value, "update", None)):
        return
    raise HyperparameterError(
        f"{where} is no gradient transformation",
        got=repr(value),
        expected="a GradientTransformation(init, update)",
        fix=f"call it: {value.__name__}(...)"
        if hasattr(value, "__name__")
        else "pass what px.optim's functions return",
    )


def _require_bools(mask: Any) -> None:
    wrong = [
        f"{tree.path_expr(p, 'mask')}={leaf!r}"
        for p, leaf in tree.flatten_with_path(mask)[0]
        if not isinstance(leaf, bool)
    ]
    if wrong:
        raise HyperparameterError(
            "masked: leaves of the mask that are no bools",
            got=", ".join(wrong),
            expected="True or False for every leaf of the parameters",
            fix="build the mask with px.tree.map(lambda p: p.ndim > 1, params), say",
        )
