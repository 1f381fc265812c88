"""The one place that imports private torch names, each with what it is for.

Everything else in the library uses public torch. When torch moves a name, this is the file to mend; `tests/core` holds
a test for each behaviour relied on.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass, DispatchKey
from torch._C._distributed_c10d import (
    FakeProcessGroup,
    ProcessGroup,
    _register_process_group,
    _resolve_process_group,
)
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._higher_order_ops.utils import register_fake
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode, _LocalDeviceMesh, enabled_local_tensor_mode
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing as no_proxy
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_modes
from torch.utils._python_dispatch import return_and_correct_aliasing

__all__ = [
    "AsyncCollectiveTensor",
    "DTensorSpec",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "DispatchKey",
    "FakeProcessGroup",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "LocalTensor",
    "LocalTensorMode",
    "ProcessGroup",
    "TensorMeta",
    "TracingContext",
    "add_each_",
    "all_local_coordinates",
    "compute_local_shape_and_global_offset",
    "default_store",
    "detect_fake_mode",
    "enabled_local_tensor_mode",
    "fake_process_group",
    "group_is_registered",
    "has_storage",
    "is_fake",
    "is_strided_shard",
    "is_traced_by",
    "make_spec",
    "no_dispatch",
    "no_dispatch_modes",
    "no_proxy",
    "number_of_rank",
    "numeric_defaults",
    "proxy_mode",
    "proxy_tracer",
    "register_fake",
    "register_process_group",
    "resolve_process_group",
    "restore_redistribute_hook",
    "set_implicit_replication",
    "set_redistribute_hook",
    "sharding_propagator",
    "shifted_shard",
    "storage_id",
    "storage_users",
    "take_shape_in_place",
    "tracing",
    "unset_fake_temporarily",
    "with_shared_storage",
    "wrap_local",
    "wrap_locals",
]


def fake_process_group(group_rank: int, size: int, name: str) -> Any:
    """A process group of our own that sends nothing; known to functional collectives by `name`.

    It takes no part in torch's world: it exists without one, and it outlives one.
    """
    backend = FakeProcessGroup._create_internal(group_rank, size)
    group: Any = ProcessGroup(HashStore(), group_rank, size)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, backend)
    group._set_group_name(name)
    return group


def group_is_registered(name: str) -> bool:
    """Whether functional collectives find a group of this name. Destroying a world forgets all names."""
    try:
        _resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError, LookupError):
        return False
    return True


def register_process_group(name: str, group: Any) -> None:
    """Makes a group known to functional collectives by name."""
    _register_process_group(name, group)  # type: ignore[arg-type]


def resolve_process_group(name: str) -> Any:
    """The group of this name."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


def all_local_coordinates(device_mesh: Any) -> Any:
    """The coordinates of every simulated rank at once, as torch's LocalTensorMode gives them."""
    return _LocalDeviceMesh.get_coordinate(device_mesh)


def is_strided_shard(placement: Any) -> bool:
    """Whether a placement is DTensor's private strided shard (a subclass of Shard in some versions)."""
    return isinstance(placement, _StridedShard)


def shifted_shard(placement: Any, by: int) -> Any:
    """A placement whose dim, if it has one, is `by` further on."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim + by, split_factor=placement.split_factor)
    return Shard(placement.dim + by) if isinstance(placement, Shard) else placement


def make_spec(device_mesh: Any, placements: tuple, shape: Any, stride: tuple, dtype: torch.dtype) -> DTensorSpec:
    """A DTensorSpec with its tensor meta."""
    return DTensorSpec(device_mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), tuple(stride), dtype))


def wrap_local(local: torch.Tensor, spec: DTensorSpec, cls: Any = DTensor, requires_grad: bool = False) -> Any:
    """A DTensor over a local tensor, without the checks of `DTensor.from_local` and without the empty constructor."""
    return cls.__new__(cls, local, spec, requires_grad=requires_grad)


def number_of_rank(value: Any, rank: int | None) -> int:
    """A number that each rank has its own of, as a `LocalTensor` mode gives it; None says that there is one rank."""
    numbers = getattr(getattr(value, "node", None), "_local_ints", None)
    return int(value) if numbers is None or rank is None else int(numbers[rank])


def take_shape_in_place(func: Any, args: Any, kwargs: Any, value: DTensor) -> Any:
    """Gives a DTensor the sizes and strides that an operator with the tag `inplace_view` makes of its own."""
    return return_and_correct_aliasing(func, args, kwargs, value)


def wrap_locals(locals_: list[torch.Tensor], specs: Sequence[DTensorSpec | None]) -> list[Any]:
    """`wrap_local` of each; one whose spec is None stays as it is."""
    new = DTensor.__new__
    return [
        local if spec is None else new(DTensor, local, spec, requires_grad=False) for local, spec in zip(locals_, specs)
    ]


def set_redistribute_hook(hook: Any) -> Any:
    """Replaces the dispatcher's redistribution of an operator's arguments: the communication that is implied.

    `hook(dispatch, op_info, *rest)` has to call `dispatch(op_info, *rest)`. Returns what `restore_redistribute_hook`
    takes.
    """
    dispatcher: Any = DTensor._op_dispatcher
    before = dispatcher.__dict__.get("redistribute_local_args")
    current = dispatcher.redistribute_local_args
    dispatcher.redistribute_local_args = lambda *args, **kwargs: hook(current, *args, **kwargs)
    return before


def restore_redistribute_hook(before: Any) -> None:
    """Undoes `set_redistribute_hook`."""
    dispatcher: Any = DTensor._op_dispatcher
    if before is None:
        dispatcher.__dict__.pop("redistribute_local_args", None)
    else:
        dispatcher.redistribute_local_args = before


def set_implicit_replication(value: bool) -> bool:
    """Whether DTensor takes a plain tensor next to a DTensor for a replicated one; returns the old setting."""
    dispatcher: Any = DTensor._op_dispatcher
    before = dispatcher._allow_implicit_replication
    dispatcher._allow_implicit_replication = value
    return before


def add_each_(sums: tuple[torch.Tensor, ...], addends: list[torch.Tensor]) -> None:
    """Adds to each tensor its addend, in one call."""
    torch._foreach_add_(sums, addends)


def storage_id(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage: equal for views of one buffer."""
    return tensor.untyped_storage()._cdata


_CDATA = operator.attrgetter("_cdata")


def storage_users(tensor: torch.Tensor) -> int:
    """How many tensors see a tensor's storage, this one included."""
    # The storage object that asks is one more.
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1


def with_shared_storage(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Indices of those whose storage other tensors see too."""
    # In one expression, so that each storage object goes before the next one comes, on the same memory.
    counts = list(map(torch._C._storage_Use_Count, map(_CDATA, map(torch.Tensor.untyped_storage, tensors))))
    return [i for i, count in enumerate(counts) if count > 2] if max(counts, default=0) > 2 else []


def numeric_defaults() -> tuple[Any, ...]:
    """What decides the dtypes that operators choose by themselves: the default dtype, autocast."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return torch.get_default_dtype(), torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")
    return (torch.get_default_dtype(),)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a plain one, with memory of its own (no fake, no wrapper)."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type != "meta"


def is_fake(tensor: Any) -> bool:
    """Whether a tensor is a fake one: shape and dtype without data."""
    return isinstance(tensor, FakeTensor)


def default_store() -> Any:
    """The key-value store of the world."""
    return torch.distributed.distributed_c10d._get_default_store()


def proxy_mode() -> Any:
    """The mode of the graph trace that is running, or None."""
    return get_proxy_mode()


def proxy_tracer() -> Any:
    """The tracer of the graph trace that is running."""
    return get_proxy_mode().tracer  # type: ignore[union-attr]


def is_traced_by(tensor: torch.Tensor, tracer: Any) -> bool:
    """Whether a tensor is a value of a tracer's graph."""
    return get_proxy_slot(tensor, tracer, None) is not None


def sharding_propagator() -> Any:
    """What works out an operator's placements for DTensor."""
    return DTensor._op_dispatcher.sharding_propagator
