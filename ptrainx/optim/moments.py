"""Running averages of gradients, as several transformations keep them: like the parameters in shape, dtype, place."""

from __future__ import annotations

from typing import Any

import torch

from ptrainx.core import tree
from ptrainx.core.errors import InputError

__all__ = ["average", "average_of_squares", "full_like", "new_count"]


def new_count() -> torch.Tensor:
    """The number of steps done, none: a 0-d int64 tensor."""
    return torch.zeros((), dtype=torch.int64)


def full_like(where: str, params: Any, value: float = 0.0) -> Any:
    """A tree of tensors filled with `value`, of the parameters' shapes, dtypes and placements.

    Raises:
        InputError: a leaf is no tensor of a real floating dtype; the message lists all such leaves.
    """
    wrong = [
        f"{tree.path_expr(path, 'params')}: {leaf.dtype if isinstance(leaf, torch.Tensor) else type(leaf).__name__}"
        for path, leaf in tree.flatten_with_path(params)[0]
        if not (isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
    ]
    if wrong:
        raise InputError(
            f"{where}.init: parameters that can't be optimized",
            got=", ".join(wrong),
            expected="tensors of a real floating dtype",
            fix="keep these values out of params, or exclude them with px.optim.masked",
        )
    return tree.map(lambda p: torch.full_like(p, value), params)


def average(updates: Any, moment: Any, decay: float) -> Any:
    """`decay * moment + (1 - decay) * updates`, in the moment's dtype; one op a leaf."""
    return tree.map(lambda u, m: torch.lerp(m, u.to(m.dtype), 1 - decay), updates, moment)


def average_of_squares(updates: Any, moment: Any, decay: float) -> Any:
    """`decay * moment + (1 - decay) * updates**2`, in the moment's dtype; two ops a leaf."""

    def one(update: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
        update = update.to(moment.dtype)
        return torch.addcmul(moment * decay, update, update, value=1 - decay)

    return tree.map(one, updates, moment)
