"""Layers from where a spec places them to where a schedule has their stages, and back.

`P("pipe")` gives each rank a run of layers; a schedule with several stages on a rank deals them out otherwise. Then one
all-to-all brings every leaf's rows to their stages at the start, and the gradients' rows back at the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ptrainx.core.trace_context import TraceContext

__all__ = ["Move", "layer_homes"]

c10d = torch.ops._c10d_functional


def layer_homes(layers: int, parts: int) -> list[int]:
    """For each layer the part that holds it, where parts are cut as DTensor cuts a dim.

    >>> layer_homes(5, 2)
    [0, 0, 0, 1, 1]
    """
    share = -(-layers // parts)
    return [layer // share for layer in range(layers)]


@dataclasses.dataclass(frozen=True)
class Move:
    """How a rank's rows move.

    Args:
        homes: layer -> the rank on which its spec places it, rising.
        owners: layer -> the rank that holds its stage.
        place: this rank.
        size: number of ranks.
        group: name of the axis's group.
    """

    homes: Sequence[int]
    owners: Sequence[int]
    place: int
    size: int
    group: str | None

    @property
    def needed(self) -> bool:
        """Whether any rank's rows move."""
        return list(self.homes) != list(self.owners)

    @property
    def held(self) -> list[int]:
        """The layers whose stages this rank holds, in the order of its rows after the move."""
        return [layer for layer, owner in enumerate(self.owners) if owner == self.place]

    def there(self, x: torch.Tensor, trace: TraceContext) -> torch.Tensor:
        """A leaf's rows, by home, to those of this rank's stages."""
        mine = [layer for layer, home in enumerate(self.homes) if home == self.place]
        order = sorted(range(len(mine)), key=lambda row: (self.owners[mine[row]], row))
        sizes = [sum(self.owners[layer] == rank for layer in mine) for rank in range(self.size)]
        given = [sum(self.homes[layer] == rank for layer in self.held) for rank in range(self.size)]
        return self._exchange(_ordered(x, order), given, sizes, trace)

    def back(self, x: torch.Tensor, trace: TraceContext) -> torch.Tensor:
        """The inverse."""
        mine = [layer for layer, home in enumerate(self.homes) if home == self.place]
        sizes = [sum(self.homes[layer] == rank for layer in self.held) for rank in range(self.size)]
        given = [sum(self.owners[layer] == rank for layer in mine) for rank in range(self.size)]
        arrived = sorted(mine, key=lambda layer: (self.owners[layer], layer))
        out = self._exchange(x, given, sizes, trace)
        return _ordered(out, [arrived.index(layer) for layer in mine])

    def _exchange(self, x: torch.Tensor, given: list[int], sizes: list[int], trace: TraceContext) -> torch.Tensor:
        with trace.marked(asked=True, reason="layers to the stages of the schedule and back"):
            started = c10d.all_to_all_single.default(x, given, sizes, self.group)
            return c10d.wait_tensor.default(started)


def _ordered(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    return x if order == list(range(len(order))) else torch.stack([x[row] for row in order])
