"""A function of one example as a graph of plain operators over a batch of them, for `vmap`.

Two traces, both on fake plain tensors of global shapes. The first records the function on one example, whatever it
does: `px.grad` inside is operators of its backward. The second runs that graph under `torch.vmap`, which turns every
operator into what does the same for a batch. What is left is a graph without any transform in it; `Batched` runs it on
plain tensors or on placed values, and autograd differentiates it like code that was written for a batch.

What a graph of operators does not show is kept by a mark: a value that the function detaches, or computes without
gradients, goes through the operator `stop_gradient`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optree
import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from ptrainx.compile.global_forms import GLOBAL_FORMS
from ptrainx.core import torch_compat as tc
from ptrainx.core.errors import HostReadError, PtrainxError, RandomnessError, TraceError
from ptrainx.core.torch_compat_functorch import custom_functions, reads_data
from ptrainx.core.trace_context import Aside, running_aside, user_source
from ptrainx.ops.random.operator import HASH, RANDOM, SUBKEYS

__all__ = ["Batched", "Example", "trace_example"]

_LIBRARY = torch.library.Library("ptrainx", "FRAGMENT")
_LIBRARY.define("stop_gradient(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("stop_gradient", lambda x: x.clone(), "CompositeExplicitAutograd")
STOP_GRADIENT = torch.ops.ptrainx.stop_gradient.default
torch.library.register_vmap(
    "ptrainx::stop_gradient", lambda info, in_dims, x: (STOP_GRADIENT(x), in_dims[0]), lib=_LIBRARY
)


def _draw_each(operator: Any) -> Any:
    """The rule of an operator that draws by a key: one draw for each key of a batch."""

    def rule(info: Any, in_dims: Any, *args: Any) -> tuple[torch.Tensor, int]:
        columns = [
            arg.movedim(dim, 0).unbind(0) if isinstance(dim, int) else [arg] * info.batch_size
            for arg, dim in zip(args, in_dims)
        ]
        return torch.stack([operator(*row) for row in zip(*columns)]), 0

    return rule


for _operator in (RANDOM, HASH, SUBKEYS):
    torch.library.register_vmap(_operator._schema.name, _draw_each(_operator), lib=_LIBRARY)

_DETACHING = {torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__}  # type: ignore[attr-defined]


class Example:
    """What the first trace has found.

    Attributes:
        graph: of one example: (*leaves) -> results.
        tree: the structure of the result.
        constants: attribute of the graph -> the tensor that it stands for, from around the function.
        mode: of the fake values.
    """

    def __init__(self, graph: GraphModule, tree: Any, constants: dict[str, torch.Tensor], mode: Any):
        self.graph, self.tree, self.constants, self.mode = graph, tree, constants, mode


def trace_example(
    name: str,
    call: Callable[[list[torch.Tensor]], tuple[list[torch.Tensor], Any]],
    leaves: Sequence[torch.Tensor],
    shapes: Sequence[tuple[int, ...]],
) -> Example:
    """Traces a function on one example.

    Args:
        name: of the function.
        call: from leaves to (leaves of the result, its structure).
        leaves: the batched ones; their dtypes and whether they are differentiated count.
        shapes: of one example.

    Raises:
        HostReadError: it reads a value on the host.
        TraceError: it is differentiated, and has a gradient written by hand.
    """
    source = user_source()
    mode = tc.FakeTensorMode(allow_non_fake_inputs=True)
    differentiated = [leaf.requires_grad and torch.is_grad_enabled() for leaf in leaves]
    foreign = _Foreign(mode)
    found: dict[str, Any] = {}

    def run(*fakes: torch.Tensor) -> list[torch.Tensor]:
        with foreign.active(), sdpa_kernel(SDPBackend.MATH):
            results, found["tree"] = call(list(fakes))
            results = [foreign.inside(r) for r in results]
        by_hand = custom_functions(results)
        if by_hand:
            raise TraceError(
                f"px.vmap of {name} is differentiated, and it calls {', '.join(by_hand)}, whose gradient is written "
                "by hand",
                source=source,
                fix="leave the torch.autograd.Function out, or write the batch dim into the function",
            )
        return [r.detach() for r in results]

    with _alone(mode), _explained(name, source):
        fakes = [
            torch.empty(shape, dtype=leaf.dtype).requires_grad_(wanted)
            for leaf, shape, wanted in zip(leaves, shapes, differentiated)
        ]
        graph = make_fx(run, tracing_mode="real")(*fakes)
    constants = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        value = getattr(graph, str(node.target))
        constants[str(node.target)] = foreign.outside(value)
    return Example(graph, found["tree"], constants, mode)


class _Foreign(TorchFunctionMode):
    """Replaces tensors from around the function by fake ones, and marks what has no gradient."""

    def __init__(self, mode: Any):
        super().__init__()
        self.mode, self.differentiated = mode, torch.is_grad_enabled()
        self.aside: Aside | None = None
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by identity: (outside, inside)
        self._outside: dict[int, torch.Tensor] = {}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, it does so."""
        self.aside = running_aside()
        with self:
            yield

    def inside(self, value: Any) -> Any:
        """What stands for a value in the trace."""
        if not isinstance(value, torch.Tensor) or (tc.is_fake(value) and value.fake_mode is self.mode):  # type: ignore[attr-defined]
            return value
        if id(value) not in self._known:
            with tc.no_dispatch_modes(), self.mode:
                fake = torch.empty(value.shape, dtype=value.dtype)
            fake.requires_grad_(value.requires_grad and torch.is_grad_enabled())
            self._known[id(value)] = (value, fake)
            self._outside[id(fake)] = value
        return self._known[id(value)][1]

    def outside(self, value: torch.Tensor) -> torch.Tensor:
        """What a tensor of the trace's graph stands for: one from around the function, or itself."""
        return self._outside.get(id(value), value)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if running_aside() is not self.aside:
            return func(*args, **(kwargs or {}))
        arguments: Any = (args, kwargs or {})
        args, kwargs = optree.tree_map(self.inside, arguments, none_is_leaf=True)
        out = STOP_GRADIENT(args[0]) if func in _DETACHING else GLOBAL_FORMS.get(func, func)(*args, **kwargs)
        if self.differentiated and not torch.is_grad_enabled():
            return optree.tree_map(_stopped, out)
        return out


def _stopped(value: Any) -> Any:
    return STOP_GRADIENT(value) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


class Batched:
    """A graph over a batch.

    Args:
        name: of the function, for messages.
        example: of one example.
        leaves: the batched ones.
        in_axes: each leaf's batched dim; None for one that all examples share.
        out_axes: where each result has the batch.

    Attributes:
        constants: what the graph takes after the leaves.
    """

    def __init__(
        self,
        name: str,
        example: Example,
        leaves: Sequence[torch.Tensor],
        in_axes: Sequence[int | None],
        out_axes: Sequence[int | None],
    ):
        names = list(example.constants)
        self.constants = list(example.constants.values())
        n = len(leaves)

        # None says that a result does not depend on the example, which torch checks.
        outs: Any = tuple(out_axes)

        def one(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            run = _Replay(example.graph, dict(zip(names, given[n:])), name)
            return tuple(run.run(*given[:n]))

        vmapped = torch.vmap(one, in_dims=(*in_axes, *[None] * len(names)), out_dims=outs, randomness="error")
        with _alone(example.mode), torch.no_grad(), _explained(name, user_source()):
            fakes = [torch.empty(v.shape, dtype=v.dtype) for v in (*leaves, *self.constants)]
            self.graph = make_fx(lambda *given: list(vmapped(*given)), tracing_mode="real")(*fakes)

    def __call__(self, *values: torch.Tensor) -> list[torch.Tensor]:
        """The results for leaves and constants."""
        return list(_Differentiable(self.graph).run(*values))


class _Replay(Interpreter):
    """Runs a graph with values in place of its constants; says which operator fails."""

    def __init__(self, graph: GraphModule, constants: dict[str, torch.Tensor], name: str):
        super().__init__(graph, garbage_collect_values=False)
        self.constants, self.name = constants, name
        self.extra_traceback = False

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.constants[target] if target in self.constants else super().get_attr(target, args, kwargs)

    def run_node(self, n: Node) -> Any:
        try:
            return super().run_node(n)
        except PtrainxError:
            raise
        except (RuntimeError, NotImplementedError, ValueError) as error:
            operator = getattr(getattr(n.target, "_schema", None), "name", str(n.target))
            if "random" in str(error):
                raise RandomnessError(
                    f"px.vmap of {self.name} draws random numbers without a key: {operator}",
                    fix="pass a key for each example: px.random.split(key, n), and px.random.normal(key, shape) inside",
                ) from error
            raise TraceError(
                f"px.vmap of {self.name}: {operator} can't be batched: {_first_sentence(error)}",
                fix="write the batch dim into the function, or loop over the examples with px.scan",
            ) from error


def _first_sentence(error: BaseException) -> str:
    return str(error).splitlines()[0].partition(". ")[0]


class _Differentiable(Interpreter):
    """Runs a graph of operators as autograd would have seen the code that they come from."""

    def __init__(self, graph: GraphModule):
        super().__init__(graph)
        self.extra_traceback = False

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.detach.default:
            return args[0]  # autograd's own, of what it keeps for the backward
        if target is STOP_GRADIENT:
            return args[0].detach()
        if torch.Tag.inplace_view in getattr(target, "tags", ()):
            # Of a temporary, whose later readers read the result; a placed value can't change its shape.
            packet = getattr(torch.ops.aten, target._schema.name.removeprefix("aten::").removesuffix("_"))
            target = getattr(packet, target._schema.overload_name or "default")
        return super().call_function(target, args, kwargs)


@contextlib.contextmanager
def _alone(mode: Any) -> Iterator[None]:
    """Inside, nothing of a trace that is running sees what happens."""
    with Aside("px.vmap").active(), tc.no_dispatch_modes(), mode:
        yield


@contextlib.contextmanager
def _explained(name: str, source: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, PtrainxError) and reads_data(error):
            raise HostReadError(
                f"px.vmap of {name} needs a value, or a shape that depends on one, while it is traced",
                got=str(error).splitlines()[0],
                source=source,
                fix="compute with torch.where and masks instead of Python's `if` and boolean indexing",
            ) from error
        raise
