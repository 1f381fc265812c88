"""A rank's part of a vocabulary: statistics of its logits, how ranks put theirs together, and the gradient.

For each row of logits a_1 .. a_V and its target t, ranks exchange the largest logit and the sum of the exponentials,
the target's own logit, and, for label smoothing, the sum of all. From these come

    lse  = log sum_v exp(a_v)
    loss = lse - (1 - s) a_t - s / V sum_v a_v + z lse^2        s: label smoothing, z: z-loss

and, on each rank alone, the gradient of its own logits

    d loss / d a_v = softmax_v (1 + 2 z lse) - (1 - s) [v = t] - s / V

Source: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3; z-loss: Chowdhery et al. 2022,
https://arxiv.org/abs/2204.02311, section 5; label smoothing: Szegedy et al. 2015, https://arxiv.org/abs/1512.00567.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch.distributed.tensor import Shard

from ptrainx.ops.collectives import wire
from ptrainx.ops.collectives.region import Region
from ptrainx.ops.parts import Call, check_no_empty_parts

__all__ = ["Settings", "Vocabulary", "wide"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a cross-entropy is of.

    Attributes:
        label_smoothing: the weight of the uniform distribution in the targets.
        ignore_index: targets that count as none.
        z_loss: the weight of the squared logarithm of the normaliser.
        label: how the call is called in reports.
        source: the user's line.
    """

    label_smoothing: float
    ignore_index: int
    z_loss: float
    label: str
    source: str


def wide(x: torch.Tensor) -> torch.Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Vocabulary:
    """The part of the vocabulary whose logits a rank has.

    Args:
        size: of the whole vocabulary.
        placements: one a mesh axis, of a value whose dim `dim` is the vocabulary; () of a plain one.
        dim: that dim.
        settings: of the loss.
        call: the call, where the values are global.

    Attributes:
        dims: the mesh dims that split the vocabulary.
        axes: their names.
    """

    def __init__(self, size: int, placements: Any, dim: int, settings: Settings, call: Call | None):
        self.size, self.settings, self.call = size, settings, call
        self.dims = [i for i, p in enumerate(placements) if call is not None and p == Shard(dim)]
        self.region: Any = None if call is None else Region(call.trace, call.label, True)
        names = () if call is None else call.trace.mesh.axis_names
        self.axes: tuple[str, ...] = tuple(names[i] for i in self.dims)
        if call is not None:
            check_no_empty_parts(call, "a vocabulary", size, [call.trace.mesh.shape[axis] for axis in self.axes])

    def own(self, targets: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(the columns of targets among this rank's `width`, 0 where they are elsewhere; whether they are here)."""
        columns = targets
        if self.axes:
            columns = targets - wire.own_start(self.region, self.axes, self.size)
        here = (columns >= 0) & (columns < width) & (targets != self.settings.ignore_index)
        return columns.masked_fill(~here, 0), here

    def statistics(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """This rank's statistics of its logits [rows, width]: [4, rows], or [3, rows] without label smoothing."""
        logits = wide(logits)
        largest = logits.amax(-1)
        # Logits that are all -inf, as those of a padded vocabulary are, must not become nan.
        shift = largest.masked_fill(largest == -math.inf, 0)
        columns, here = self.own(targets, logits.shape[-1])
        found = logits.gather(-1, columns.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0)
        rows = [largest, (logits - shift.unsqueeze(-1)).exp().sum(-1), found]
        return torch.stack([*rows, logits.sum(-1)] if self.settings.label_smoothing else rows)

    def losses(self, statistics: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the loss of each row, its `lse`), from every rank's statistics; the same on every rank."""
        largest = statistics[0]
        for axis in self.axes:
            largest = self._sent(largest, axis, "max")
        # A rank whose logits are all -inf adds nothing.
        factor = (statistics[0] - largest).exp()
        sums = torch.cat([(statistics[1] * factor).unsqueeze(0), statistics[2:]])
        for axis in self.axes:
            sums = self._sent(sums, axis, "sum")
        lse = sums[0].log() + largest
        smoothing, z = self.settings.label_smoothing, self.settings.z_loss
        loss = lse - (1 - smoothing) * sums[1]
        if smoothing:
            loss = loss - smoothing / self.size * sums[2]
        if z:
            loss = loss + z * lse * lse
        return loss.masked_fill(targets == self.settings.ignore_index, 0), lse

    def _sent(self, x: torch.Tensor, axis: str, op: str) -> torch.Tensor:
        assert self.call is not None
        with self.call.marked(True, "statistics of the rows"):
            return wire.all_reduce(self.region, x, axis, op)

    def gradient(
        self, logits: torch.Tensor, targets: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of this rank's logits [rows, width], given those of the rows' losses."""
        smoothing, z = self.settings.label_smoothing, self.settings.z_loss
        grad = wide(grad).masked_fill(targets == self.settings.ignore_index, 0)
        scale = grad * (1 + 2 * z * lse) if z else grad
        out = (wide(logits) - lse.unsqueeze(-1)).exp() * scale.unsqueeze(-1)
        if smoothing:
            out = out - (smoothing / self.size * grad).unsqueeze(-1)
        columns, here = self.own(targets, logits.shape[-1])
        taken = (grad * (smoothing - 1)).masked_fill(~here, 0)
        return out.scatter_add(-1, columns.unsqueeze(-1), taken.unsqueeze(-1)).to(logits.dtype)
