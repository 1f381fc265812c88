"""Private torch names about cuts: where DTensor takes a rank's own part of a value that every rank holds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import Shard

__all__ = ["announce_cuts"]


def announce_cuts(inside: Callable[[Any, int], contextlib.AbstractContextManager]) -> Callable[[], None]:
    """Runs each cut of a replicated value within `inside(mesh, mesh_dim)`; returns the undo."""
    original = Shard._replicate_to_shard

    def cut(self: Any, local: Any, mesh: Any, mesh_dim: int, index: Any) -> Any:
        with inside(mesh, mesh_dim):
            return original(self, local, mesh, mesh_dim, index)

    Shard._replicate_to_shard = cut  # type: ignore[method-assign, assignment]

    def undo() -> None:
        Shard._replicate_to_shard = original  # type: ignore[method-assign]

    return undo
