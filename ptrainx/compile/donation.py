"""Donation: an argument gives its memory to the results, and its Python object refuses every later use.

A donated tensor keeps its shape, dtype and identity, so that it prints as what it was; any operation on it raises a
`DonationError` with the name of the leaf.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import optree
import torch
from torch.distributed.tensor import DTensor

from ptrainx.compile.trace import Program
from ptrainx.core import torch_compat as tc
from ptrainx.core.errors import DonationError
from ptrainx.mesh.simulated import SimulatedDTensor, local_tensors

__all__ = ["DonatedDTensor", "DonatedTensor", "check_donation", "exclusive", "is_donated", "refuse", "retire"]

_T: Any = torch.Tensor
_STILL_KNOWN = {
    _T.shape.__get__,
    _T.dtype.__get__,
    _T.device.__get__,
    _T.ndim.__get__,
    _T.requires_grad.__get__,
    _T.__hash__,
    _T.size,
    _T.dim,
    _T.numel,
}


class _Donated:
    _donated_as: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _STILL_KNOWN:
            with tc.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        arguments: Any = (args, kwargs)
        bad = next(a for a in optree.tree_leaves(arguments) if isinstance(a, _Donated))
        refuse(bad)

    def refuse_use(self) -> NoReturn:
        """Raises; what places values asks for it by this name."""
        refuse(self)

    def to_local(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(self)

    def full_tensor(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(self)

    def redistribute(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse(self)

    def __repr__(self) -> str:
        return f"<donated value {self._donated_as}>"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


class DonatedDTensor(_Donated, DTensor):  # type: ignore[misc]
    """A placed value after its donation.

    Its name stands where its local tensor was: a step has thousands of leaves, and an attribute of its own would cost
    each of them a dictionary.
    """

    __torch_function__ = _Donated.__torch_function__
    _donated_as = property(lambda self: self._local_tensor)


class DonatedTensor(_Donated, torch.Tensor):  # type: ignore[misc]
    """A plain tensor after its donation."""


def is_donated(value: Any) -> bool:
    """Whether a value has been donated."""
    return isinstance(value, _Donated)


def refuse(value: Any) -> NoReturn:
    """Raises the error that a donated value's use deserves."""
    raise DonationError(
        f"{value._donated_as} was donated, and its memory has been reused",
        fix="use the value that the step returned, or leave the argument out of donate_argnums",
    )


def retire(leaves: Sequence[Any], names: Sequence[tuple[int, str]]) -> None:
    """Makes donated leaves unusable, and lets go of their memory.

    Args:
        leaves: of a call.
        names: (index of a donated leaf, how it is called in messages).
    """
    for i, called in names:
        leaf = leaves[i]
        if type(leaf) is DTensor or isinstance(leaf, DTensor):
            leaf.__class__ = DonatedDTensor
            leaf._local_tensor = called  # type: ignore[assignment]
        elif type(leaf) in (torch.Tensor, torch.nn.Parameter):
            # It keeps its shape and dtype, over a single element of memory.
            element = _element(leaf.dtype, leaf.device)
            leaf.data = element if leaf.ndim == 0 else element.expand(leaf.shape)
            leaf.__class__ = DonatedTensor
            leaf._donated_as = called


@functools.cache
def _element(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What all plain donated values of a dtype have for memory: nobody reads it."""
    return torch.zeros((), dtype=dtype, device=device)


def donated_names(program: Program) -> list[tuple[int, str]]:
    """(index, name for messages) of each donated argument."""
    return [(i, f"argument {a.path} of {program.name}") for i, a in enumerate(program.arguments) if a.donated]


def exclusive(local: torch.Tensor, leaf: Any) -> torch.Tensor:
    """A donated leaf's local tensor in memory that nobody else sees; a copy where somebody does.

    Args:
        local: this rank's part, which may be a view of the leaf.
        leaf: the leaf as it was passed: placed, plain, numpy or a number.
    """
    if isinstance(leaf, SimulatedDTensor):
        shared = tc.storage_users(local) > 1
    elif isinstance(leaf, DTensor):
        shared = local is leaf._local_tensor and tc.storage_users(local) > 1
    elif isinstance(leaf, torch.Tensor):
        # The local part and the leaf are two that see it.
        shared = tc.storage_users(local) > 2 or not local.untyped_storage().resizable()
    else:
        shared = isinstance(leaf, np.ndarray)
    return local.clone() if shared else local


def _storages(leaf: Any) -> list[int]:
    if isinstance(leaf, SimulatedDTensor):
        return [tc.storage_id(t) for t in {id(t): t for t in local_tensors(leaf).values()}.values()]
    if isinstance(leaf, DTensor):
        return [tc.storage_id(leaf._local_tensor)]
    return [tc.storage_id(leaf)] if isinstance(leaf, torch.Tensor) else []


def check_donation(leaves: Sequence[Any], donated: Sequence[int], program: Program) -> None:
    """Refuses a donated leaf whose memory another leaf uses too.

    Raises:
        DonationError: names both leaves.
    """
    given: dict[int, int] = {}
    for i in donated:
        for storage in _storages(leaves[i]):
            if given.setdefault(storage, i) != i:
                _refuse_shared(given[storage], i, "both donated", program)
    chosen = set(donated)
    for i, leaf in enumerate(leaves):
        if i not in chosen:
            for storage in _storages(leaf):
                if storage in given:
                    _refuse_shared(given[storage], i, "one of them donated", program)


def _refuse_shared(first: int, second: int, how: str, program: Program) -> NoReturn:
    a, b = program.arguments[first].path, program.arguments[second].path
    raise DonationError(
        f"{program.name}: arguments {a} and {b} share one buffer, {how}",
        fix="clone() one of them, or leave the argument out of donate_argnums",
    )
