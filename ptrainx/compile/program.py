"""What is compiled: a program with its arguments and outputs, and one rank's graph of it.

`trace` makes a `RankGraph` of a `Program`, `passes` change it, `lower` and `executable` run it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ptrainx.core.trace_context import Remat
from ptrainx.mesh.axes import join_axes, split_axes
from ptrainx.mesh.logical import LogicalMesh
from ptrainx.mesh.mesh import AbstractMesh
from ptrainx.mesh.partition_spec import PartitionSpec

__all__ = ["Argument", "Output", "Program", "RankGraph"]


@dataclasses.dataclass(frozen=True)
class Argument:
    """A leaf of the arguments: its path, global shape, dtype, and spec; whether it arrives as a plain global value."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: PartitionSpec
    plain: bool
    donated: bool = False


@dataclasses.dataclass(frozen=True)
class Output:
    """A leaf of the result."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: PartitionSpec


@dataclasses.dataclass(frozen=True)
class Program:
    """What is traced: `call(leaves)` runs the user's function on the dynamic leaves of its arguments.

    `flatten(*args, **kwargs)` takes the arguments of a call to those leaves, if they are like the ones traced for.
    `source` is the line that defines the function. `logical` is the mesh that is traced for instead, where reductions
    are ordered: each device hosts several of its ranks.
    """

    name: str
    call: Callable[[list[Any]], Any]
    arguments: tuple[Argument, ...]
    out_specs: Any
    mesh: AbstractMesh
    device: torch.device
    flatten: Callable[..., list[Any]]
    source: str
    logical: LogicalMesh | None = None

    @property
    def traced(self) -> Program:
        """The program as a rank of the trace's mesh runs it."""
        return self if self.logical is None else dataclasses.replace(self, mesh=self.logical, logical=None)


@dataclasses.dataclass
class RankGraph:
    """One rank's program.

    Attributes:
        module: the graph; placeholders are the arguments' local tensors, then the captured values'.
        rank: whose it is.
        captures: tensors that the function used without being given them.
        capture_versions: torch's version counter of each plain capture, None for a placed one.
        out_tree: the structure of the result.
        outputs: its leaves, in the order of the graph's outputs.
        fake_mode: the mode that the fake tensors in `node.meta["val"]` belong to.
        axis_of: group name -> mesh axis, for the collectives; of a group over several axes, `data*model`.
        shape: axis -> size; empty if nobody has said.
        flat: whether a group over several axes can be made: not where each axis has a backend of its own.
        remats: the calls of `remat`ed functions, by number.
    """

    module: torch.fx.GraphModule
    rank: int
    captures: list[torch.Tensor]
    capture_versions: list[int | None]
    out_tree: Any
    outputs: tuple[Output, ...]
    fake_mode: Any
    axis_of: dict[str, str]
    shape: Mapping[str, int] = dataclasses.field(default_factory=dict)
    flat: bool = True
    remats: dict[int, Remat] = dataclasses.field(default_factory=dict)

    def group_over(self, groups: Sequence[str]) -> str:
        """The group over the axes of some groups together, major to minor."""
        axes = {axis for group in groups for axis in split_axes(self.axis_of[group])}
        key = join_axes(axis for axis in self.shape if axis in axes)
        known = next((name for name, axis in self.axis_of.items() if axis == key), None)
        name = known or "*".join(groups)
        self.axis_of[name] = key
        return name

    def place_in(self, axis: str) -> tuple[int, int]:
        """(this rank's place, number of members) along an axis; (-1, 0) if the mesh is not known."""
        if axis not in self.shape:
            return -1, 0
        below = math.prod(list(self.shape.values())[list(self.shape).index(axis) + 1 :])
        return self.rank // below % self.shape[axis], self.shape[axis]
