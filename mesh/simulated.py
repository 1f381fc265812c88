"""Values of a simulated mesh outside a jitted step: DTensors whose local part is every rank's tensor at once.

`SimulatedDTensor` is a DTensor over torch's `LocalTensor`. Each operation on one, wherever it comes from (a user, an
optimizer, the autograd engine), runs under a mode that applies it to every rank and computes collectives across them;
the real world's process groups are never asked.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import optree
import torch
from torch.distributed.tensor import DTensor, Placement, Replicate

from ptrainx.core import torch_compat as tc
from ptrainx.core.avals import describe
from ptrainx.core.errors import InputError, MeshError
from ptrainx.mesh.axes import axes_text
from ptrainx.mesh.exchange import COLLECTIVES, exchange
from ptrainx.mesh.placement import replicate, spec_of
from ptrainx.mesh.virtual import VirtualDeviceMesh

__all__ = ["SimulatedDTensor", "SimulatedMode", "local_tensors", "on_all_ranks", "wrap_all"]

# A value with more elements than this is printed without them.
PRINTED = 1 << 20

# What stands for a collective under way; here none ever is.
_DONE_AT_ONCE = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")

# What reads a value on the host. Real DTensors ask the world's processes here, which must not happen.
_HOST_READS = (torch.ops.aten.equal.default, torch.ops.aten._local_scalar_dense.default)


class SimulatedMode(tc.LocalTensorMode):
    """Runs local operations on every rank, and functional collectives across the ranks of one virtual mesh."""

    def __init__(self, device_mesh: VirtualDeviceMesh):
        super().__init__(device_mesh.size())
        self.device_mesh = device_mesh

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in _DONE_AT_ONCE:
            return args[0]
        if name in COLLECTIVES:
            return self._collective(name, args)
        if func.namespace in ("_c10d_functional", "c10d"):
            raise MeshError(
                f"the collective {name} can't be simulated",
                expected=f"one of {', '.join(sorted(COLLECTIVES))}",
                fix="use redistribute, or run it in real processes with `ptrainx run`",
            )
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _collective(self, name: str, args: Any) -> Any:
        tensor, *middle, group_name = args
        every = _every_rank(tensor, self.device_mesh)
        outputs: dict[int, torch.Tensor] = {}
        for group in self.device_mesh.groups_called(group_name):
            rank_args = [_on_rank(middle, rank) for rank in group]
            outputs.update(zip(group, exchange(name, [every[rank] for rank in group], rank_args)))
        return tc.LocalTensor({rank: outputs[rank] for rank in sorted(outputs)})

    # torch's mode patches the coordinates of every DeviceMesh in the process; ours has its own, and the real ones stay.
    def _patch_device_mesh(self) -> None: ...

    def _unpatch_device_mesh(self) -> None: ...


def _on_rank(args: Any, rank: int) -> Any:
    def value(arg: Any) -> Any:
        ints = getattr(getattr(arg, "node", None), "_local_ints", None)
        return arg if ints is None else ints[rank]

    return optree.tree_map(value, args)


class SimulatedDTensor(DTensor):
    """A global value on a simulated mesh. An ordinary DTensor to every tool that knows DTensor.

    It prints as the whole value, once. It can be deep-copied, but not pickled.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with tc.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        arguments: Any = (args, kwargs or {})
        leaves = [leaf for leaf in optree.tree_leaves(arguments) if isinstance(leaf, DTensor)]
        mesh = _one_mesh(func, leaves)
        if (
            torch.Tag.inplace_view in func.tags
        ):  # torch changes the local tensors, and not what the value says of itself
            raise InputError(
                f"{func} would change the shape of a placed value in place",
                fix="write value = value.squeeze() instead of value.squeeze_()",
            )
        if func in _HOST_READS:
            return func(*(_whole(arg) if isinstance(arg, DTensor) else arg for arg in args))
        # As plain DTensors, so that torch's own dispatch takes them; still the same objects, for in-place operations.
        ours: list[Any] = [leaf for leaf in leaves if type(leaf) is SimulatedDTensor]
        try:
            for leaf in ours:
                leaf.__class__ = DTensor
            with on_all_ranks(mesh):
                out = func(*args, **(kwargs or {}))
        finally:
            for leaf in ours:
                leaf.__class__ = SimulatedDTensor
        return _mark(out)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Any:
        return _ToLocal.apply(self, grad_placements)

    def redistribute(
        self,
        device_mesh: Any = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> Any:
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise MeshError(
                "redistribute moves a value on its own mesh",
                got=str(device_mesh),
                expected=str(self.device_mesh),
                fix="px.device_put(px.device_get(value), spec, mesh) moves it between meshes",
            )
        target = tuple(placements) if placements is not None else (Replicate(),) * self.device_mesh.ndim
        value = self if forward_dtype is None else self.to(forward_dtype)
        return _Redistribute.apply(value, target)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        return _WholeValue.apply(replicate(self), grad_placements)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        about = f"{describe(self)} {spec_of(self)} on Mesh({_axes(self)}, simulated)"
        grad = f", grad_fn=<{self.grad_fn.name()}>" if self.grad_fn is not None else ", requires_grad=True"
        grad = grad if self.requires_grad else ""
        if self.numel() > PRINTED:
            return f"DTensor({about}{grad})"
        contents = str(_whole(self)).removeprefix("tensor(").removesuffix(")").replace("\n       ", "\n    ")
        space = "\n    " if self.ndim else " "
        return f"DTensor({about},{space}{contents}{grad})"

    def __format__(self, spec: str) -> str:
        return format(_whole(self), spec) if self.ndim == 0 else format(repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise InputError(
                "only a value that no operation has made can be deep-copied with its gradient",
                got=f"grad_fn {self.grad_fn}",
                fix="copy value.detach()",
            )
        parts = [part.clone() for part in local_tensors(self).values()]
        result = memo[id(self)] = wrap_all(parts, self._spec, self.requires_grad)
        if getattr(self, "_is_param", False):
            result._is_param = True
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise MeshError(
            f"a value of the simulated mesh {_axes(self)} can't be pickled: its devices are in this process",
            got=f"{describe(self)} {spec_of(self)}",
            fix="pickle px.device_get(value), and px.device_put it where it is read",
        )


def _axes(value: DTensor) -> str:
    mesh = value.device_mesh
    return axes_text(dict(zip(mesh.mesh_dim_names or (), mesh.shape)))


def _one_mesh(func: Any, leaves: list[Any]) -> Any:
    first = next(leaf.device_mesh for leaf in leaves if isinstance(leaf.device_mesh, VirtualDeviceMesh))
    for leaf in leaves:
        if leaf.device_mesh != first:
            raise MeshError(
                f"{func}: values of different meshes meet",
                got=f"{first} and {leaf.device_mesh}",
                fix="px.device_put(px.device_get(value), spec, mesh) moves a value to the other's mesh",
            )
    return first


@contextlib.contextmanager
def on_all_ranks(device_mesh: VirtualDeviceMesh) -> Iterator[None]:
    """Inside, operations on local tensors of this virtual mesh run on every rank."""
    current = tc.enabled_local_tensor_mode()
    if isinstance(current, SimulatedMode) and current.device_mesh == device_mesh:
        yield
        return
    device_mesh.ensure_registered()
    with SimulatedMode(device_mesh):
        yield


def wrap_all(locals_by_rank: Sequence[torch.Tensor], spec: Any, requires_grad: bool = False) -> SimulatedDTensor:
    """A global value from the local tensor of each rank, in rank order."""
    with torch.no_grad():
        local = tc.LocalTensor(dict(enumerate(locals_by_rank)))
    return tc.wrap_local(local, spec, SimulatedDTensor, requires_grad)


def local_tensors(value: DTensor) -> dict[int, torch.Tensor]:
    """Each rank's part of a simulated value; the value's own memory."""
    return _every_rank(value._local_tensor, value.device_mesh)


def _every_rank(local: torch.Tensor, device_mesh: Any) -> dict[int, torch.Tensor]:
    if isinstance(local, tc.LocalTensor):
        return dict(local._local_tensors)
    return dict.fromkeys(range(device_mesh.size()), local)


class _Redistribute(torch.autograd.Function):
    """`redistribute` whose backward runs on all ranks too, from wherever the engine was started."""

    @staticmethod
    def forward(ctx: Any, value: Any, placements: tuple[Placement, ...]) -> Any:
        ctx.before = value.placements
        plain = tc.wrap_local(value._local_tensor, value._spec)
        with on_all_ranks(value.device_mesh):
            moved = plain.redistribute(plain.device_mesh, placements)
        # An operation that changes nothing gives the same local tensor back; autograd wants a new value.
        same = moved._local_tensor is value._local_tensor
        return _mark(tc.wrap_local(_view(moved._local_tensor) if same else moved._local_tensor, moved._spec))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.redistribute(placements=_for_gradients(ctx.before)), None


class _ToLocal(torch.autograd.Function):
    """`to_local`: the LocalTensor, a view of the value's memory."""

    @staticmethod
    def forward(ctx: Any, value: Any, grad_placements: Any) -> Any:
        ctx.spec, ctx.placements = value._spec, tuple(grad_placements or _for_gradients(value.placements))
        return _view(value._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return wrap_all(list(_every_rank(grad, ctx.spec.mesh).values()), _at(ctx.spec, ctx.placements)), None


class _WholeValue(torch.autograd.Function):
    """The one value that all ranks hold of a replicated value, as a plain tensor."""

    @staticmethod
    def forward(ctx: Any, value: Any, grad_placements: Any) -> Any:
        ctx.spec, ctx.placements = value._spec, tuple(grad_placements or value.placements)
        return local_tensors(value)[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return wrap_all([grad.clone() for _ in range(ctx.spec.mesh.size())], _at(ctx.spec, ctx.placements)), None


def _at(spec: Any, placements: tuple[Placement, ...]) -> Any:
    meta = spec.tensor_meta
    return tc.make_spec(spec.mesh, placements, meta.shape, meta.stride, meta.dtype)


def _for_gradients(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    # The gradient of a sum that is owed is the same for every addend.
    return tuple(Replicate() if placement.is_partial() else placement for placement in placements)


def _view(local: torch.Tensor) -> torch.Tensor:
    return local.view_as(local)


def _whole(value: DTensor) -> torch.Tensor:
    return value.detach().full_tensor()  # type: ignore[attr-defined]


def _mark(tree: Any) -> Any:
    def mark(leaf: Any) -> Any:
        if type(leaf) is DTensor:
            leaf.__class__ = SimulatedDTensor
        return leaf

    return optree.tree_map(mark, tree)
