"""The modes under which user code runs: what turns plain tensors into global values, and what refuses.

They see torch functions as the user calls them, record the user's line, make replicated global values of plain
tensors, and refuse host reads and randomness without a key. What runs underneath is the matter of `rules`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import optree
import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode

from ptrainx.compile.global_forms import GLOBAL_FORMS, PER_SHARD_FORMS
from ptrainx.compile.rules import READ_FIX, refuse_randomness
from ptrainx.core import torch_compat as tc
from ptrainx.core.avals import as_tensor, describe
from ptrainx.core.errors import HostReadError, MutationError, TraceError
from ptrainx.core.torch_compat_functorch import in_functorch
from ptrainx.core.trace_context import TraceContext, running_aside, user_source
from ptrainx.mesh.mesh import AbstractMesh, Mesh
from ptrainx.mesh.placement import contiguous_strides, trace_placements
from ptrainx.mesh.transfer import same_mesh
from ptrainx.ops.collectives.relate import relate

__all__ = ["Captures", "EagerValues", "GlobalValues"]

T = torch.Tensor
_HOST_READS: dict[Any, str] = {
    T.item: ".item()",
    T.tolist: ".tolist()",
    T.numpy: ".numpy()",
    T.__array__: "numpy conversion",
    T.__bool__: "`if tensor:` (or `bool(tensor)`, `and`, `or`, `not`)",
    T.__float__: "float(tensor)",
    T.__int__: "int(tensor)",
    T.__index__: "use as a Python index",
    T.__complex__: "complex(tensor)",
    T.__contains__: "`in`",
    T.__format__: "formatting",
    torch.equal: "torch.equal",
    torch.allclose: "torch.allclose",
    T.equal: ".equal()",
    T.allclose: ".allclose()",
    T.is_nonzero: ".is_nonzero()",
    torch.is_nonzero: "torch.is_nonzero",
}
_IF_FIX = "choose with torch.where(condition, a, b), or make the value static (static_argnums)"
_RANDOM = {
    torch.rand,
    torch.randn,
    torch.randint,
    torch.randperm,
    torch.normal,
    torch.rand_like,
    torch.randn_like,
    torch.randint_like,
    torch.bernoulli,
    torch.poisson,
    torch.multinomial,
    T.bernoulli,
    T.multinomial,
    T.normal_,
    T.uniform_,
    T.bernoulli_,
    T.random_,
    T.exponential_,
    T.geometric_,
    T.cauchy_,
    T.log_normal_,
}
_DROPOUTS = {
    getattr(module, name)
    for module in (torch, torch.nn.functional)
    for name in dir(module)
    if name.rstrip("_") in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
}


class Captures:
    """Tensors that the step uses without being given them: plain ones are constants, placed ones become inputs."""

    def __init__(self, fake_mode: Any, view: Any):
        self.fake_mode, self.view = fake_mode, view
        self.values: list[torch.Tensor] = []
        self.versions: list[int | None] = []
        self.fakes: list[torch.Tensor] = []
        self._known: dict[int, DTensor] = {}

    def replica(self, value: torch.Tensor, trace: TraceContext) -> DTensor:
        """The global value that stands for a captured tensor inside the trace."""
        if id(value) not in self._known:
            self._known[id(value)] = self._capture(value, trace)
        return self._known[id(value)]

    def _capture(self, value: torch.Tensor, trace: TraceContext) -> DTensor:
        placed = isinstance(value, DTensor)
        if isinstance(value, DTensor) and not _is_on(value, trace.mesh):
            raise TraceError(
                f"{trace.name} uses a value of another mesh",
                got=str(value.device_mesh),
                expected=str(trace.mesh),
                source=user_source(3),
                fix="pass it as an argument, placed on the step's mesh",
            )
        local = value._local_tensor if isinstance(value, DTensor) else value
        if isinstance(local, tc.LocalTensor):
            local = local._local_tensors[trace.rank]
        # Out of sight of the trace, which takes a fake tensor that it has not seen made for a constant.
        with tc.no_dispatch_modes(), self.fake_mode:
            fake = torch.empty(local.shape, dtype=local.dtype, device=local.device)
        self.values.append(value)
        self.versions.append(None if placed else value._version)
        self.fakes.append(fake)
        placements = tuple(value.placements) if isinstance(value, DTensor) else (Replicate(),) * self.view.ndim
        spec = tc.make_spec(self.view, placements, value.shape, contiguous_strides(value.shape), value.dtype)
        return tc.wrap_local(fake, spec)


def _is_on(value: DTensor, mesh: AbstractMesh) -> bool:
    if isinstance(mesh, Mesh):
        return same_mesh(value, mesh)
    own = value.device_mesh
    return dict(zip(own.mesh_dim_names or (), own.shape)) == mesh.shape


class GlobalValues(TorchFunctionMode):
    """Inside, every tensor that user code meets is a global value."""

    def __init__(self, trace: TraceContext, captures: Captures):
        super().__init__()
        self.trace, self.captures = trace, captures
        self.replicate = (Replicate(),) * trace.view.ndim
        self.backward_sources = _BackwardSources()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "__get__" or func in _PASSIVE or running_aside():
            return func(*args, **kwargs)
        self.trace.at_call(user_source(2))
        _refuse_functorch(self.trace)
        if func in _HOST_READS and not any(_is_traced(a) for a in args):
            return self._read_constant(func, args, kwargs)
        self._refuse(func, args, kwargs)
        with tc.DisableTorchFunctionSubclass():
            arguments: Any = (args, kwargs)
            args, kwargs = optree.tree_map(self._enter, arguments, none_is_leaf=True)
            function, args, kwargs = _in_region(self.trace, func, args, kwargs)
            out = self._leave(function(*args, **kwargs))
        if torch.is_grad_enabled():
            self.backward_sources.tag(out, self.trace)
        return out

    def _refuse(self, func: Any, args: Any, kwargs: Any) -> None:
        if func in _HOST_READS:
            what = _HOST_READS[func]
            raise HostReadError(
                f"{self.trace.name} reads a traced value on the host: {what}",
                got=f"{describe(args[0])}, whose value is known only when the step runs",
                source=self.trace.origin.source,
                fix=_IF_FIX if what.startswith("`if") else READ_FIX,
            )
        if func in _RESHAPED_IN_PLACE:
            name = func.__name__
            raise MutationError(
                f"{self.trace.name} changes the shape of a global value in place: {name}",
                source=self.trace.origin.source,
                fix=f"make a new value: {name.rstrip('_')} instead of {name}",
            )
        _refuse_random(self.trace, func, args, kwargs)

    def _read_constant(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Reads captured plain tensors, whose values are there; they must not change afterwards."""
        for value in args:
            if isinstance(value, torch.Tensor):
                self.captures.replica(value, self.trace)
        with tc.no_dispatch_modes():
            return func(*args, **kwargs)

    def _enter(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, tc.AsyncCollectiveTensor):
            return value
        if isinstance(value, DTensor):
            if value.device_mesh is self.trace.view:
                return self.trace.inside(value)
            ours = value if value.device_mesh is self.captures.view else self.captures.replica(value, self.trace)
            return self._from_around(ours)
        if tc.is_fake(value):
            return self._wrap(value)
        return self._from_around(self.captures.replica(value, self.trace))

    def _from_around(self, value: DTensor) -> Any:
        """A value of the step as what runs now may use it: the body of a `shard_map` has it as a per-shard one."""
        inside, region = self.trace.inside(value), self.trace.region
        return inside if region is None else region.close_over(inside)

    def _leave(self, out: Any) -> Any:
        if isinstance(out, torch.Tensor):
            return self._wrap(out) if tc.is_fake(out) and not isinstance(out, DTensor) else out
        if isinstance(out, (tuple, list)):
            several: Any = out
            return optree.tree_map(self._leave, several) if not isinstance(out, torch.Size) else out
        return out

    def as_global(self, value: Any) -> Any:
        """Any leaf as a global value."""
        value = as_tensor(value)
        with tc.DisableTorchFunction():
            return self._enter(value)

    def _wrap(self, fake: torch.Tensor) -> DTensor:
        spec = tc.make_spec(self.trace.view, self.replicate, fake.shape, fake.stride(), fake.dtype)
        return tc.wrap_local(fake, spec, requires_grad=fake.requires_grad)


class EagerValues(TorchFunctionMode):
    """The eager backend's mode: plain tensors become replicated global values, which can be read."""

    def __init__(self, trace: TraceContext):
        super().__init__()
        self.trace = trace
        self.replicate = (Replicate(),) * trace.view.ndim

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "__get__" or func in _PASSIVE or running_aside():
            return func(*args, **kwargs)
        self.trace.origin = dataclasses.replace(self.trace.origin, source=user_source(2))
        _refuse_random(self.trace, func, args, kwargs)
        _refuse_functorch(self.trace)
        if func in _HOST_READS:
            args = tuple(self._whole(a) if isinstance(a, DTensor) else a for a in args)
            with tc.DisableTorchFunction(), tc.no_dispatch_modes():
                return func(*args, **kwargs)
        with tc.DisableTorchFunctionSubclass():
            arguments: Any = (args, kwargs)
            args, kwargs = optree.tree_map(self._enter, arguments, none_is_leaf=True)
            function, args, kwargs = _in_region(self.trace, func, args, kwargs)
            return self._leave(function(*args, **kwargs))

    def _whole(self, value: DTensor) -> torch.Tensor:
        with tc.DisableTorchFunction():
            detached: Any = value.detach()
            whole = detached.redistribute(value.device_mesh, self.replicate)
        local = whole._local_tensor
        if isinstance(local, tc.AsyncCollectiveTensor):
            local = local.wait()
        return local._local_tensors[0] if isinstance(local, tc.LocalTensor) else local

    def _enter(self, value: Any) -> Any:
        return self.replicated(value) if isinstance(value, torch.Tensor) else value

    def _leave(self, out: Any) -> Any:
        if isinstance(out, torch.Tensor):
            return self.replicated(out)
        if isinstance(out, (tuple, list)) and not isinstance(out, torch.Size):
            several: Any = out
            return optree.tree_map(self._leave, several)
        return out

    def as_global(self, value: Any) -> Any:
        """Any leaf as a global value."""
        return self.replicated(as_tensor(value))

    def replicated(self, value: torch.Tensor) -> Any:
        """A tensor as a global value."""
        if isinstance(value, tc.AsyncCollectiveTensor):
            return value
        if isinstance(value, DTensor):
            # As a plain DTensor: the simulated ranks' mode is on already.
            plain = value if type(value) is DTensor else tc.wrap_local(value._local_tensor, value._spec)
            around = self.trace.region is not None and value.device_mesh is not self.trace.view
            return self.trace.region.close_over(plain) if around else plain
        spec = tc.make_spec(self.trace.view, self.replicate, value.shape, contiguous_strides(value.shape), value.dtype)
        return tc.wrap_local(value.detach(), spec, requires_grad=value.requires_grad)

    def argument(self, value: torch.Tensor, argument: Any) -> Any:
        """An argument, as it is called inside."""
        local = value._local_tensor if isinstance(value, DTensor) else value.detach()
        placements = trace_placements(argument.spec, self.trace.mesh)
        strides = contiguous_strides(value.shape)
        return tc.wrap_local(local, tc.make_spec(self.trace.view, placements, value.shape, strides, value.dtype))


def _in_region(trace: TraceContext, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """A function with its arguments as the body of a `shard_map` calls it, or the step around one."""
    if trace.region is None:
        return GLOBAL_FORMS.get(func, func), args, kwargs
    function = PER_SHARD_FORMS.get(func, func)
    return function, *relate(trace.region, func, args, kwargs, trace.origin.source)


def _refuse_functorch(trace: TraceContext) -> None:
    """torch's own function transforms wrap values in a way that hides how the ranks' are related."""
    if trace.region is not None and in_functorch():
        raise TraceError(
            f"{trace.region.name} calls torch.vmap, or another transform of torch.func, inside px.shard_map",
            source=trace.origin.source,
            fix="write the batch dim out (einsum, broadcasting), or differentiate with px.grad",
        )


class _BackwardSources:
    """Lets each node of autograd's graph announce, before it runs, the line of the forward that made it."""

    def __init__(self) -> None:
        self.known: dict[int, Any] = {}

    def tag(self, out: Any, trace: TraceContext) -> None:
        """Marks the nodes behind a result that no earlier line has marked."""
        source, call = trace.origin.source, trace.origin.call
        stack = [t.grad_fn for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor)]
        while stack:
            node = stack.pop()
            if node is None or id(node) in self.known or not hasattr(node, "register_prehook"):
                continue
            self.known[id(node)] = node
            node.register_prehook(lambda _, source=source, call=call: trace.at_call(source, call))
            stack.extend(before for before, _ in node.next_functions)


def _refuse_random(trace: TraceContext, func: Any, args: Any, kwargs: Any) -> None:
    dropout = (
        func in _DROPOUTS and _argument(args, kwargs, 1, "p", 0.5) > 0 and _argument(args, kwargs, 2, "training", True)
    )
    if func in _RANDOM or dropout:
        refuse_randomness(trace, getattr(func, "__name__", str(func)))


def _is_traced(value: Any) -> bool:
    return isinstance(value, DTensor) or tc.is_fake(value)


def _argument(args: Any, kwargs: Any, index: int, name: str, default: Any) -> Any:
    return args[index] if len(args) > index else kwargs.get(name, default)


_RESHAPED_IN_PLACE = {T.squeeze_, T.unsqueeze_, T.t_, T.transpose_, T.swapaxes_, T.swapdims_, T.resize_, T.set_}
"""torch changes the local tensors, and not what the global value says of itself."""
_PASSIVE = {
    T.size,
    T.dim,
    T.stride,
    T.numel,
    T.nelement,
    T.is_floating_point,
    T.is_complex,
    T.__len__,
    T.__hash__,
    T.__repr__,
    T.is_contiguous,
    T.element_size,
    T.backward,
    T.requires_grad_,
}
