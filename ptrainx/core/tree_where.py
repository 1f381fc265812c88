"""A choice between two trees, made in the graph."""

from __future__ import annotations

from typing import Any

import torch

from ptrainx.core import tree

__all__ = ["where"]


def where(condition: Any, x: Any, y: Any) -> Any:
    """`torch.where`, leaf by leaf: `x` where the condition is true, else `y`.

    The condition is not read on the host, so that a jitted step may depend on it.

    Args:
        condition: a bool, or a 0-d bool tensor; one that broadcasts to every leaf will do.
        x, y: pytrees of one structure; leaves are tensors or numbers, of the same dtype in both.

    Raises:
        TreeError: the two structures differ.

    >>> where(torch.tensor(False), {"a": torch.tensor(1.0)}, {"a": torch.tensor(2.0)})
    {'a': tensor(2.)}
    """
    chosen = torch.as_tensor(condition)
    return tree.map(lambda a, b: torch.where(chosen, a, b), x, y)
