"""Private torch names about strided shards: how DTensor gathers a dim that a view has merged from several.

torch's own gathering works out the order of the rows with index tensors, which a trace would carry into every step, and
sizes with tensors that a trace can't read. Where the rows divide evenly the order is a transposition.

To weigh the ways in which an operator may run, torch plans each redistribution of a strided shard by a search over all
placements, which on a mesh of three axes takes minutes an operator. Here its price is that of gathering what differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed import _functional_collectives as collectives
from torch.distributed._local_tensor import enabled_local_tensor_mode
from torch.distributed.tensor import _utils
from torch.distributed.tensor._collective_utils import MeshTopoInfo, allgather_cost, spec_to_bytes
from torch.distributed.tensor._ops import utils
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["make_strided_shards_traceable"]


def make_strided_shards_traceable() -> Callable[[], None]:
    """Replaces how strided shards are gathered and measured; returns the undo."""
    original, measured = _StridedShard._to_replicate_tensor, _StridedShard.local_shard_size_and_offset

    offset = _utils._compute_local_shape_and_global_offset

    def gather(self: Any, local: Any, mesh: Any, mesh_dim: int, logical_shape: Any) -> Any:
        parts, dim, split = mesh.size(mesh_dim), self.dim, self.split_factor
        if logical_shape[dim] % (parts * split) or local.shape[dim] * parts != logical_shape[dim]:
            return original(self, local, mesh, mesh_dim, logical_shape)
        if parts == 1:
            return local
        whole: Any = collectives.all_gather_single(local.contiguous(), gather_dim=dim, group=(mesh, mesh_dim))
        if isinstance(whole, collectives.AsyncCollectiveTensor):
            whole = whole.wait()
        before, after = whole.shape[:dim], whole.shape[dim + 1 :]
        blocks = whole.reshape(*before, parts, split, logical_shape[dim] // (parts * split), *after)
        return blocks.transpose(dim, dim + 1).reshape(whole.shape)

    _StridedShard._to_replicate_tensor = gather  # type: ignore[method-assign,assignment]
    _StridedShard.local_shard_size_and_offset = _outside_of_traces(measured)  # type: ignore[method-assign]
    _utils._compute_local_shape_and_global_offset = _outside_of_traces(offset)

    weighing: Any = utils
    price = weighing.redistribute_cost
    weighing.redistribute_cost = lambda current, target: _cost(price, current, target)

    def undo() -> None:
        weighing.redistribute_cost = price
        _utils._compute_local_shape_and_global_offset = offset
        _StridedShard._to_replicate_tensor = original  # type: ignore[method-assign]
        _StridedShard.local_shard_size_and_offset = measured  # type: ignore[method-assign]

    return undo


def _cost(price: Callable[[Any, Any], float], current: Any, target: Any) -> float:
    """The price of a redistribution in torch's units; of strided shards without a plan."""
    pairs = [*zip(current.placements, target.placements)]
    if not any(isinstance(p, _StridedShard) for pair in pairs for p in pair) or current.mesh != target.mesh:
        return price(current, target)
    topology = MeshTopoInfo.build_from_mesh(current.mesh)
    gigabytes = spec_to_bytes(current) / current.num_shards / 2**30
    total = 0.0
    for axis, (now, then) in enumerate(pairs):
        if now != then and not now.is_replicate():
            gigabytes *= current.mesh.size(axis)
            total += allgather_cost(gigabytes, topology, axis)
    return total


def _outside_of_traces(function: Callable[..., Any]) -> Callable[..., Any]:
    """Arithmetic on sizes that torch does with tensors, and reads: no part of a trace."""

    def measure(*args: Any, **kwargs: Any) -> Any:
        if enabled_local_tensor_mode() is not None:
            return function(*args, **kwargs)
        with _disable_current_modes():
            return function(*args, **kwargs)

    return measure
