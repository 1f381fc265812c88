"""What a jitted function's programs are found by, and how its arguments are counted and called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ptrainx.compile.donation import is_donated, refuse
from ptrainx.core.avals import ShapeDtypeStruct, as_tensor
from ptrainx.core.errors import InputError

__all__ = ["ProgramCache", "leaf_key", "leaf_keys", "parameter_names", "positions_of", "typed", "what_changed"]


class ProgramCache(dict[Any, Any]):
    """Key -> program, with the last one that was found at hand.

    The specs that a step returns are the same objects at every call, so the keys of two calls in turn mostly compare by
    identity. A lookup would hash every spec, and compare those that came in first by value, which takes longer than
    all else that a call does for a leaf.
    """

    _last: tuple[Any, Any] = (None, None)

    def find(self, key: Any) -> Any:
        """The program of a key, or None."""
        last, program = self._last
        if key == last:
            return program
        program = self.get(key)
        if program is not None:
            self._last = (key, program)
        return program

    def clear(self) -> None:
        """Forgets all programs."""
        super().clear()
        self._last = (None, None)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        self._last = (None, None)


def typed(value: Any) -> Any:
    """A static value that is equal only to one of its type: 1, 1.0 and True make different programs."""
    return (tuple, tuple(map(typed, value))) if type(value) is tuple else (type(value), value)


_SCALARS: dict[type, Any] = {bool: ((), torch.bool), int: ((), torch.int64)}


def leaf_key(leaf: Any) -> Any:
    """What of a leaf a compiled program depends on. Placed values: their spec; others: shape and dtype."""
    if isinstance(leaf, DTensor):
        if is_donated(leaf):
            refuse(leaf)
        return leaf._spec
    if isinstance(leaf, torch.Tensor):
        if is_donated(leaf):
            refuse(leaf)
        return tuple(leaf.shape), leaf.dtype
    if isinstance(leaf, ShapeDtypeStruct):
        return leaf.shape, leaf.dtype
    kind = type(leaf)
    if kind in _SCALARS:
        return _SCALARS[kind]
    if kind is float:
        return (), torch.get_default_dtype()
    if isinstance(leaf, (np.ndarray, np.generic)):
        return tuple(leaf.shape), _torch_dtype(leaf.dtype)
    return kind


def leaf_keys(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """`leaf_key` of each leaf; placed ones, of which there are most, without a call."""
    return tuple([leaf._spec if type(leaf) is DTensor else leaf_key(leaf) for leaf in leaves])


@functools.cache
def _torch_dtype(dtype: Any) -> Any:
    return as_tensor(np.zeros((), dtype)).dtype


def what_changed(key: Any, cache: dict) -> str:
    """How a key differs from the last one in the cache, in words."""
    old = next(reversed(cache))
    if key[0] != old[0]:
        return f"the structure of its arguments, from {old[0]} to {key[0]}"
    if key[2] != old[2]:
        return f"static arguments, from {old[2]} to {key[2]}"
    if key[3] != old[3]:
        return f"the mesh, from {old[3]} to {key[3]}"
    if key[4] != old[4]:
        return f"torch's defaults (dtype, autocast), from {old[4]} to {key[4]}"
    changes = [f"leaf {i} from {a} to {b}" for i, (a, b) in enumerate(zip(old[1], key[1])) if a != b]
    return "; ".join(changes) or "nothing that is known"


def positions_of(value: int | Sequence[int], name: str) -> tuple[int, ...]:
    """Argument positions as a tuple.

    Raises:
        InputError: one is no position.
    """
    numbers = (value,) if isinstance(value, int) else tuple(value)
    if any(not isinstance(n, int) or n < 0 for n in numbers):
        raise InputError(f"{name}={value!r}", expected="positions of arguments, counted from 0")
    return numbers


def parameter_names(fn: Callable) -> tuple[str, ...]:
    """The names of a function's positional parameters, as far as it tells them."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
