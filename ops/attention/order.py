"""The zigzag order of a sequence, in which causal attention over shards is the same work for every rank.

A causal query sees what is before it: of shards in order, the last has almost all the work, and the others wait. In
zigzag order the sequence is cut into twice as many chunks as there are shards, and shard i holds chunks i and 2n-1-i,
one with little work and one with much:

    4 shards    [0 7] [1 6] [2 5] [3 4]
"""

from __future__ import annotations

import torch

from ptrainx.core.errors import InputError, MeshError, SpecError
from ptrainx.core.trace_context import current_trace, user_source
from ptrainx.mesh.transfer import default_mesh

__all__ = ["axis_size_of", "unzigzag", "zigzag"]


def zigzag(length: int, shards: int | str = "seq") -> torch.Tensor:
    """The position that each place of a sequence in zigzag order holds.

    A sequence is put into this order once, where it enters, with its targets; everything that works position by
    position goes on as before, positions are this very index, and `ring_attention(order="zigzag")` knows the order. On
    one shard it is the order of the sequence.

    Args:
        length: of the sequence.
        shards: how many there are, or the mesh axis along which they lie: of the running step's mesh, or outside of a
            step of the one that `px.device_put` would take.

    Returns:
        int64 [length]: `tokens[:, zigzag(length)]` is in zigzag order.

    Raises:
        SpecError: a length that 2 * shards does not divide.
        MeshError: an axis that the mesh does not have.

    Source: Brandon et al. 2023, Striped Attention (arXiv:2311.09431), whose idea it is; chunks paired as in the Llama 3
    report's context parallelism (arXiv:2407.21783, section 3.3.2).

    >>> zigzag(8, shards=2)
    tensor([0, 1, 6, 7, 2, 3, 4, 5])
    """
    n = _shards(shards)
    if n == 1:
        return torch.arange(length)
    check_zigzag("zigzag", length, n)
    chunks = torch.arange(length).view(2 * n, length // (2 * n))
    return torch.stack([chunks[:n], chunks.flip(0)[:n]], 1).reshape(-1)


def unzigzag(length: int, shards: int | str = "seq") -> torch.Tensor:
    """The place at which each position lies in zigzag order; the inverse of `zigzag`.

    Args:
        length, shards: as for `zigzag`.

    Returns:
        int64 [length]: `x[:, unzigzag(length)]` of an x in zigzag order is in the order of the sequence.

    Raises:
        SpecError, MeshError: as `zigzag`.

    >>> x = torch.arange(8) * 10
    >>> x[zigzag(8, shards=2)][unzigzag(8, shards=2)]
    tensor([ 0, 10, 20, 30, 40, 50, 60, 70])
    """
    n = _shards(shards)
    if n == 1:
        return torch.arange(length)
    check_zigzag("unzigzag", length, n)
    places = torch.arange(length).view(n, 2, length // (2 * n))
    return torch.cat([places[:, 0], places[:, 1].flip(0)]).reshape(-1)


def check_zigzag(name: str, length: int, n: int) -> None:
    """Refuses a length that can't be cut into two chunks a shard.

    Raises:
        SpecError: it can't.
    """
    if length % (2 * n):
        raise SpecError(
            f"px.ops.{name}: a sequence of length {length} can't be cut into two chunks for each of {n} shards",
            expected=f"a multiple of {2 * n}",
            fix=f"pad the sequence to {-(-length // (2 * n)) * 2 * n}",
            source=user_source(),
        )


def axis_size_of(name: str, axis: str) -> int:
    """How many shards there are along an axis of the running step's mesh, or of the mesh around.

    A mesh of one device need not have the axis.

    Raises:
        MeshError: the mesh does not have it.
    """
    trace = current_trace()
    mesh = default_mesh([]) if trace is None else trace.mesh
    if axis in mesh.shape:
        return int(mesh.shape[axis])
    if mesh.size == 1:
        return 1
    raise MeshError(
        f"px.ops.{name}: the mesh has no axis {axis!r}",
        got=str(mesh),
        fix=f"make it with one (px.make_mesh({axis}=...); its size may be 1), or name another axis",
        source=user_source(),
    )


def _shards(shards: int | str) -> int:
    if isinstance(shards, str):
        return axis_size_of("zigzag", shards)
    if isinstance(shards, int) and shards > 0:
        return shards
    raise InputError(
        f"px.ops.zigzag: shards={shards!r}", expected="a positive number, or the name of an axis", source=user_source()
    )
