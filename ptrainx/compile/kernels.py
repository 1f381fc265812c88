"""Which kernel runs an operator.

Matrix products are most of a CPU step. torch's `mm` goes to MKL; oneDNN computes the same, as exactly, and on some
processors in half the time, on others slower. So each product of some size, in shape and strides, is timed once, when
it is first compiled; what was found stays in the cache folder for this processor and torch. Ranks take one choice, that
of the first rank which has the product, so that replicas stay equal to the bit.

Everything else is called by the shortest way there is: torch's own bindings parse their arguments in C, which saves
most of a microsecond against an operator's handle.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from ptrainx.compile.agreement import Agreement
from ptrainx.compile.disk_cache import DiskCache
from ptrainx.compile.graph import called_bodies, loops_of, walk
from ptrainx.compile.sharing import share

__all__ = [
    "ONEDNN_MM",
    "Product",
    "callable_of",
    "choose_kernel",
    "choose_products",
    "products_of",
    "settled_products",
    "use_onednn",
]

_MIN_FLOPS = 2e6
# MKL is the default: oneDNN has to be better by more than the noise of a measurement.
_MARGIN = 0.95
_SECONDS, _FEWEST, _MOST = 4e-3, 2, 8
_MKL, _ONEDNN = "mkl", "onednn"
mm = torch.ops.aten.mm.default

_BINDINGS: dict[str, Callable[..., Any]] = {
    "add.Tensor": torch.add,
    "sub.Tensor": torch.sub,
    "mul.Tensor": torch.mul,
    "div.Tensor": torch.div,
    "add_.Tensor": torch.Tensor.add_,
    "sub_.Tensor": torch.Tensor.sub_,
    "mul_.Tensor": torch.Tensor.mul_,
    "div_.Tensor": torch.Tensor.div_,
    "mm.default": torch.mm,
    "bmm.default": torch.bmm,
    "view.default": torch.Tensor.view,
    "t.default": torch.t,
    "transpose.int": torch.transpose,
    "permute.default": torch.permute,
    "sqrt.default": torch.sqrt,
    "sqrt_.default": torch.Tensor.sqrt_,
    "rsqrt.default": torch.rsqrt,
    "neg.default": torch.neg,
    "lerp_.Scalar": torch.Tensor.lerp_,
    "addcmul_.default": torch.Tensor.addcmul_,
}
"""Operators with a binding that takes the same arguments."""


def _run_onednn(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(left, right.t(), None, "none", [], "")


# Kept, since its end would take the operator away.
_LIBRARY = torch.library.Library("ptrainx_onednn", "DEF")
_LIBRARY.define("mm(Tensor left, Tensor right) -> Tensor")
_LIBRARY.impl("mm", _run_onednn, "CPU")
_LIBRARY.impl("mm", lambda left, right: left.new_empty(left.shape[0], right.shape[1]), "Meta")
ONEDNN_MM = torch.ops.ptrainx_onednn.mm.default
"""`aten.mm` of float32 on the CPU, by oneDNN."""


def choose_kernel(node: Node) -> Callable[..., Any]:
    """What the generated code calls for a node."""
    target: Any = node.target
    return _run_onednn if target is ONEDNN_MM else callable_of(target)


def callable_of(target: Any) -> Callable[..., Any]:
    """An operator without the Python layer in front of it."""
    schema = getattr(target, "_schema", None)
    if schema is not None and schema.name.startswith("aten::"):
        name = f"{schema.name.removeprefix('aten::')}.{schema.overload_name or 'default'}"
        if name in _BINDINGS:
            return _BINDINGS[name]
    return getattr(target, "_op", target)


class Product(NamedTuple):
    """A matrix product that is worth a choice; float32, on the CPU.

    Attributes:
        left, right: shapes.
        left_strides, right_strides: as they lie in memory.
    """

    left: tuple[int, int]
    right: tuple[int, int]
    left_strides: tuple[int, int]
    right_strides: tuple[int, int]

    def __str__(self) -> str:
        (m, k), (_, n) = self.left, self.right
        layout = "".join("nt"[strides[-1] != 1] for strides in (self.left_strides, self.right_strides))
        return f"[{m}, {k}] @ [{k}, {n}] {layout} {self.left_strides}{self.right_strides}"


def products_of(graphs: Iterable[Graph]) -> list[Product]:
    """The products of graphs and of their loops' bodies, each once."""
    nodes = (node for graph in graphs for node, _ in walk(graph))
    return list(dict.fromkeys(found for node in nodes if (found := _product(node)) is not None))


def _product(node: Node) -> Product | None:
    if node.target is not mm:
        return None
    left, right = (operand.meta["val"] for operand in node.args[:2])  # type: ignore[union-attr]
    if left.dtype is not torch.float32 or left.device.type != "cpu":
        return None
    if 2 * left.shape[0] * left.shape[1] * right.shape[1] < _MIN_FLOPS:
        return None
    return Product(tuple(left.shape), tuple(right.shape), tuple(left.stride()), tuple(right.stride()))


def choose_products(products: list[Product], cache: DiskCache, meeting: Agreement | None) -> dict[str, str]:
    """A kernel for each product: "mkl" or "onednn".

    Args:
        products: of this process.
        cache: what was found before is read there, what is found now is kept there.
        meeting: of the ranks that have to choose alike; None for one rank.

    Returns:
        the product in text -> its kernel; products of other ranks too.
    """
    mine = {str(product): _remembered(product, cache) for product in products} if _has_onednn() else {}
    choices: dict[str, str] = {}
    for theirs in share(meeting, "kernels", mine) if meeting is not None else [mine]:
        choices = theirs | choices
    return choices


def settled_products(products: list[Product]) -> dict[str, str]:
    """A kernel for each product by the processor alone, without a measurement, whose outcome may differ another time.

    oneDNN is the faster one on AMD's processors with AVX-512, nearly always.
    """
    fast = _has_onednn() and "AMD" in _processor() and "AVX512" in _processor()
    kernel = _ONEDNN if fast else _MKL
    return {str(product): kernel for product in products}


def use_onednn(graph: Graph, choices: Mapping[str, str]) -> None:
    """Puts oneDNN's product where it was chosen, in loops' bodies too."""
    for node in graph.nodes:
        product = _product(node)
        if product is not None and choices.get(str(product)) == _ONEDNN:
            node.target = ONEDNN_MM
    for loop in loops_of(graph):
        use_onednn(loop.body.graph, choices)
    for body in called_bodies(graph).values():
        use_onednn(body.graph, choices)


def _remembered(product: Product, cache: DiskCache) -> str:
    text = f"{_processor()} {torch.__version__} {torch.get_num_threads()} threads {product}"
    key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    found = cache.read("kernels", key)
    if found is not None and found.decode() in (_MKL, _ONEDNN):
        return found.decode()
    choice = fastest(product)
    cache.write("kernels", key, choice.encode())
    return choice


def fastest(product: Product) -> str:
    """The kernel that takes less time, the best of some trials each, in turn."""
    generator = torch.Generator().manual_seed(0)
    operands = [
        torch.empty_strided(shape, strides, dtype=torch.float32).uniform_(-1, 1, generator=generator)
        for shape, strides in ((product.left, product.left_strides), (product.right, product.right_strides))
    ]
    # A thread's own time, where one thread does it all: others on this machine count less.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = {_MKL: float("inf"), _ONEDNN: float("inf")}
    kernels: dict[str, Callable[..., torch.Tensor]] = {_MKL: torch.mm, _ONEDNN: _run_onednn}
    begun = time.perf_counter()
    with torch.no_grad():
        for kernel in kernels.values():
            kernel(*operands)
        for trial in range(_MOST):
            for name, kernel in kernels.items():
                start = clock()
                kernel(*operands)
                best[name] = min(best[name], clock() - start)
            if trial + 1 >= _FEWEST and time.perf_counter() - begun > _SECONDS:
                break
    return _ONEDNN if best[_ONEDNN] < _MARGIN * best[_MKL] else _MKL


@functools.cache
def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@functools.cache
def _processor() -> str:
    """The processor's name."""
    try:
        with open("/proc/cpuinfo") as info:
            names = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0] if names else platform.processor()} {torch.backends.cpu.get_cpu_capability()}"
