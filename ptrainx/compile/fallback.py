"""An operator on global values for which DTensor finds no way at the operands' placements.

DTensor refuses some operators at some placements (a view that splits a sharded dim unevenly, an operator without a
rule). Here the operands are brought to placements at which it does work: sums are paid first, then one mesh axis after
the other is gathered; with everything replicated, an operator that DTensor does not know runs on the local tensors. The
communication counts as implied.

Where an axis cuts a dim unevenly, the last ranks hold less, or nothing, and an operator may fail on them alone (the
maximum of nothing), or count what is not there. So operators that are not known to take such parts get them gathered:
all ranks have to decide alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import optree
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from ptrainx.core import torch_compat as tc
from ptrainx.core.errors import PtrainxError, TraceError
from ptrainx.core.trace_context import TraceContext
from ptrainx.mesh.placement import uneven_axes

__all__ = ["run_somewhere"]

Placements = tuple[Any, ...]


def run_somewhere(run: Callable[..., Any], func: Any, args: tuple, kwargs: dict, trace: TraceContext) -> Any:
    """The result of `run(func, args, kwargs)`, at other placements of the operands if need be.

    Args:
        run: DTensor's own dispatch.
        func: an ATen operator.
        args: its arguments, DTensors among them.
        kwargs: likewise.
        trace: the running trace.

    Raises:
        TraceError: an operator writes in place into a view, which would have to change its placement.
    """
    try:
        if not _takes_uneven_parts(func, args) and any(uneven_axes(x) for x in _operands(args, kwargs)):
            raise RuntimeError(f"{func} of a dim that is cut unevenly")
        if func in _FILLS and any(p.is_partial() for p in args[0].placements):
            raise RuntimeError(f"{func} would give every addend of a sum that is owed the whole value")
        if _number_beside_sum(func, args):
            raise RuntimeError(f"{func} of a sum that is owed and a number")
        out = run(func, args, kwargs)
        if func not in _VIEWS or not (_strided(args[0]) and _strided(out)):
            return out
        error: Exception = RuntimeError(f"{func} of a dim that is merged from several, one of them sharded")
    except PtrainxError:
        raise
    except (RuntimeError, NotImplementedError) as refused:
        if _cause(refused) is not None or _NOT_OURS in str(refused):
            raise
        error = refused
    operands = _operands(args, kwargs)
    if not operands:
        raise error
    return _elsewhere(run, func, args, kwargs, operands, trace, error)


def _operands(args: tuple, kwargs: dict) -> list[DTensor]:
    arguments: Any = (args, kwargs)
    return [leaf for leaf in optree.tree_leaves(arguments) if isinstance(leaf, DTensor)]


def _number_beside_sum(func: Any, args: tuple) -> bool:
    """Whether an owed sum meets a number in a place for tensors, as in `x.sum() + 0.1`, but for a factor.

    torch 2.13 takes such a number for a 0-d tensor when it looks up what it decided for a call before, and gives both
    calls the answer of the first: every rank adds the number to its addend, or the tensor counts as a number. Part of
    a norm, which is a kind of its own, says that it is a "sum" too, but takes no factor.
    """
    if not any(i < len(args) and isinstance(args[i], (int, float, complex)) for i in _places_for_tensors(func)):
        return False
    owed = [p for x in _operands(args, {}) for p in x.placements if p.is_partial()]
    return bool(owed) and not (
        func in _SCALES and all(type(p) is Partial and p.reduce_op in ("sum", "avg") for p in owed)
    )


@functools.cache
def _places_for_tensors(func: Any) -> tuple[int, ...]:
    return tuple(i for i, formal in enumerate(func._schema.arguments) if str(formal.type) == "Tensor")


def _takes_uneven_parts(func: Any, args: tuple) -> bool:
    """Whether ranks may run an operator on parts of different size."""
    return _keeps_uneven_dims(args[0], args[1]) if func in _VIEWS else _is_local(func)


@functools.cache
def _is_local(func: Any) -> bool:
    """Whether an operator works on each element for itself, moves dims, or sums, and the sum of nothing is zero."""
    name = func._schema.name.removeprefix("aten::").rstrip("_")
    if name.startswith("_foreach_"):
        return name not in ("_foreach_norm", "_foreach_max")
    return torch.Tag.pointwise in func.tags or name in _OF_UNEVEN_PARTS


_OF_UNEVEN_PARTS = {
    "_to_copy", "addmm", "alias", "bmm", "clone", "contiguous", "copy", "detach", "dot", "empty_like", "expand",
    "full_like", "lift_fresh", "mm", "mv", "new_zeros", "ones_like", "permute", "squeeze", "sum", "t", "transpose",
    "unsqueeze", "zero", "zeros_like",
}  # fmt: skip


def _keeps_uneven_dims(value: Any, size: Any) -> bool:
    """Whether a view leaves the dims that are cut unevenly what they are."""
    axes = uneven_axes(value) if isinstance(value, DTensor) else set()
    for dim in {value.placements[i].dim for i in axes}:
        before = math.prod(value.shape[:dim])
        if not any(math.prod(size[:e]) == before and size[e] == value.shape[dim] for e in range(len(size))):
            return False
    return True


_SCALES = (
    torch.ops.aten.mul.Tensor,
    torch.ops.aten.mul_.Tensor,
    torch.ops.aten.div.Tensor,
    torch.ops.aten.div_.Tensor,
)
_NOT_OURS = "got mixed torch.Tensor and DTensor"

# torch 2.13 runs these on every addend of a sum; `1 - x` of a sum may come as a fill, too.
_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor}

# torch 2.13 gets the strides of a strided shard wrong where a view splits its dim into several and it stays strided.
_VIEWS = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default}


def _strided(value: Any) -> bool:
    return isinstance(value, DTensor) and any(tc.is_strided_shard(p) for p in value.placements)


def _cause(error: BaseException) -> BaseException | None:
    """The error of ours that torch has wrapped."""
    cause = error.__cause__
    while cause is not None and not isinstance(cause, PtrainxError):
        cause = cause.__cause__
    return cause


def _elsewhere(
    run: Any, func: Any, args: tuple, kwargs: dict, operands: list[DTensor], trace: TraceContext, error: Exception
) -> Any:
    written = _written(func, args, kwargs)
    arguments: Any = (args, kwargs)
    with trace.marked(asked=False, reason=f"operands of {func}, which has no rule for their placements"):
        for keep in _ways(operands):
            moved: dict[int, DTensor] = {id(x): _moved(x, keep) for x in operands}
            new_args, new_kwargs = optree.tree_map(lambda x, moved=moved: moved.get(id(x), x), arguments)
            try:
                out = run(func, new_args, new_kwargs)
                if func in _VIEWS and _strided(new_args[0]) and _strided(out):
                    continue
            except PtrainxError:
                raise
            except (RuntimeError, NotImplementedError) as again:
                if _cause(again) is not None:
                    raise
                continue
            break
        else:
            out = _on_replicas(func, args, kwargs, moved)
    for old in written:
        new = moved[id(old)]
        if new is not old:
            _take_over(old, new, error, trace)
    same = {id(moved[id(x)]): x for x in written}
    return optree.tree_map(lambda x: same.get(id(x), x), out)


def _ways(operands: list[DTensor]) -> Iterator[Callable[[int, Any], bool]]:
    """Which placements to keep, in the order of the tries: `keep(mesh dim, placement)`."""
    ndim = operands[0].device_mesh.ndim
    sharded = [i for i in reversed(range(ndim)) if any(_splits(x.placements[i]) for x in operands)]
    uneven = set().union(*(uneven_axes(x) for x in operands))
    if uneven:
        yield lambda i, p: p.is_partial() or i not in uneven
        sharded = [i for i in sharded if i not in uneven]
    if any(p.is_partial() for x in operands for p in x.placements):
        yield lambda i, p: _splits(p) and i not in uneven
    for axis in sharded:
        yield lambda i, p, axis=axis: _splits(p) and i != axis and i not in uneven  # type: ignore[misc]
    yield lambda i, p: False


def _splits(placement: Any) -> bool:
    return placement.is_shard() or tc.is_strided_shard(placement)


def _moved(x: DTensor, keep: Callable[[int, Any], bool]) -> DTensor:
    placements = tuple(p if p.is_replicate() or keep(i, p) else Replicate() for i, p in enumerate(x.placements))
    return x if placements == tuple(x.placements) else x.redistribute(x.device_mesh, placements)


def _on_replicas(func: Any, args: tuple, kwargs: dict, moved: dict[int, DTensor]) -> Any:
    """The operator on local tensors, which are the whole values; so is what it returns."""
    first = next(iter(moved.values()))
    mesh, replicate = first.device_mesh, (Replicate(),) * first.device_mesh.ndim
    locals_: dict[int, DTensor] = {}

    def enter(x: Any) -> Any:
        if id(x) not in moved:
            return x
        local = moved[id(x)]._local_tensor
        locals_[id(local)] = moved[id(x)]
        return local

    def leave(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) in locals_:
            return locals_[id(x)]
        return tc.wrap_local(x, tc.make_spec(mesh, replicate, x.shape, x.stride(), x.dtype))

    arguments: Any = (args, kwargs)
    local_args, local_kwargs = optree.tree_map(enter, arguments)
    return optree.tree_map(leave, func(*local_args, **local_kwargs))


def _written(func: Any, args: tuple, kwargs: dict) -> list[DTensor]:
    """The operands that the operator writes into."""
    found = []
    for i, formal in enumerate(func._schema.arguments):
        if formal.alias_info is not None and formal.alias_info.is_write:
            value: Any = args[i] if i < len(args) else kwargs.get(formal.name)
            found += [leaf for leaf in optree.tree_leaves(value) if isinstance(leaf, DTensor)]
    return found


def _take_over(old: DTensor, new: DTensor, error: Exception, trace: TraceContext) -> None:
    """Makes a value that was written at another placement be there from now on."""
    if old._is_view():
        raise TraceError(
            f"{trace.name} writes in place into a view, which has to change its placement for that",
            got=str(error).splitlines()[0],
            source=trace.origin.source,
            fix="make a new value instead of writing in place, or constrain the base with px.reshard",
        ) from error
    old._local_tensor, old._spec = new._local_tensor, new._spec
