"""Values of a simulated mesh outside a jitted step: DTensors whose local part is every rank's tensor at once.

`SimulatedDTensor` is a DTensor over torch's `LocalTensor`. Each operation on one runs under a mode that applies it to
every rank and computes collectives across them; the real world's process groups are never asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import optree
import torch
from torch.distributed.tensor import DTensor

from ptrainx.core import torch_compat as tc
from ptrainx.mesh.exchange import COLLECTIVES, exchange
from ptrainx.mesh.virtual import VirtualDeviceMesh

__all__ = ["SimulatedDTensor", "SimulatedMode", "local_tensors", "on_all_ranks", "wrap_all"]


class SimulatedMode(tc.LocalTensorMode):
    """Runs local operations on every rank, and functional collectives across the ranks of one virtual mesh."""

    def __init__(self, device_mesh: VirtualDeviceMesh):
        super().__init__(device_mesh.size())
        self.device_mesh = device_mesh

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in COLLECTIVES and isinstance(args[0], tc.LocalTensor):
            return self._collective(name, args)
        if name == "_c10d_functional::wait_tensor":
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _collective(self, name: str, args: Any) -> Any:
        tensor, *middle, group_name = args
        outputs: dict[int, torch.Tensor] = {}
        for group in self.device_mesh.group_ranks[group_name]:
            rank_args = [_on_rank(middle, rank) for rank in group]
            results = exchange(name, [tensor._local_tensors[rank] for rank in group], rank_args, group)
            outputs.update(zip(group, results))
        return tc.LocalTensor({rank: outputs[rank] for rank in sorted(outputs)})


def _on_rank(args: Any, rank: int) -> list[Any]:
    def value(arg: Any) -> Any:
        ints = getattr(getattr(arg, "node", None), "_local_ints", None)
        return arg if ints is None else ints[rank]

    return optree.tree_map(value, list(args))


class SimulatedDTensor(DTensor):
    """A global value on a simulated mesh. An ordinary DTensor to every tool that knows DTensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mesh = _mesh_of((args, kwargs))
        if mesh is None:
            with tc.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        with on_all_ranks(mesh), tc.DisableTorchFunctionSubclass():
            return _mark(func(*args, **(kwargs or {})))

    def to_local(self, *args: Any, **kwargs: Any) -> Any:
        with on_all_ranks(self.device_mesh):
            return super().to_local(*args, **kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> Any:
        with on_all_ranks(self.device_mesh):
            return _mark(super().redistribute(*args, **kwargs))

    def full_tensor(self, **kwargs: Any) -> torch.Tensor:
        with on_all_ranks(self.device_mesh):
            whole = super().full_tensor(**kwargs)
            return whole.reconcile() if isinstance(whole, tc.LocalTensor) else whole

    def __repr__(self) -> str:  # type: ignore[override]
        parts = "\n".join(f"  rank {r}: {t}" for r, t in sorted(local_tensors(self).items()))
        return f"DTensor({self.device_mesh}, {self.placements},\n{parts})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


@contextlib.contextmanager
def on_all_ranks(device_mesh: Any) -> Iterator[None]:
    """Inside, operations on local tensors of this virtual mesh run on every rank."""
    current = tc.enabled_local_tensor_mode()
    if isinstance(current, SimulatedMode) and current.device_mesh == device_mesh:
        yield
        return
    device_mesh.ensure_registered()
    with SimulatedMode(device_mesh):
        yield


def wrap_all(locals_by_rank: list[torch.Tensor], spec: Any, requires_grad: bool = False) -> SimulatedDTensor:
    """A global value from the local tensor of each rank, in rank order."""
    with torch.no_grad():
        local = tc.LocalTensor(dict(enumerate(locals_by_rank)))
    return tc.wrap_local(local, spec, SimulatedDTensor, requires_grad)


def local_tensors(value: DTensor) -> dict[int, torch.Tensor]:
    """Each rank's part of a simulated value; the value's own memory."""
    local = value._local_tensor
    if isinstance(local, tc.LocalTensor):
        return dict(local._local_tensors)
    return {rank: local for rank in range(value.device_mesh.size())}


def _mesh_of(tree: Any) -> VirtualDeviceMesh | None:
    for leaf in optree.tree_leaves(tree):
        if isinstance(leaf, DTensor) and isinstance(leaf.device_mesh, VirtualDeviceMesh):
            return leaf.device_mesh
    return None


def _mark(tree: Any) -> Any:
    def mark(leaf: Any) -> Any:
        if type(leaf) is DTensor:
            leaf.__class__ = SimulatedDTensor
        return leaf

    return optree.tree_map(mark, tree)
