"""Private torch names about Inductor: compiling a graph, keeping the result in a file, its settings.

Importing this file imports Inductor, which takes a second: import it where something is compiled.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

with contextlib.ExitStack() as _stack:
    # Inductor starts worker processes when it is imported where Triton is; ours are started by nobody.
    _before = os.environ.get("TORCH_WARM_POOL")
    os.environ["TORCH_WARM_POOL"] = "0"
    _stack.callback(
        lambda: os.environ.pop("TORCH_WARM_POOL") if _before is None else os.environ.update(TORCH_WARM_POOL=_before)
    )
    from torch._inductor import codecache
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.ir import Pointwise
    from torch._inductor.lowering import fallback_handler, permute, register_lowering
    from torch._inductor.output_code import CompiledFxGraphConstants
    from torch._inductor.virtualized import ops

from torch._guards import TracingContext, tracing

__all__ = [
    "Pointwise",
    "compile_graph",
    "decompositions",
    "fallback_handler",
    "from_bytes",
    "headers_ahead",
    "index_loader",
    "inductor_settings",
    "ops",
    "permute",
    "register_lowering",
    "to_bytes",
]

Compiled = Any


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's table: operators that it wants written out as smaller ones."""
    return dict(select_decomp_table())


@contextlib.contextmanager
def inductor_settings(folder: str, threads: int) -> Iterator[None]:
    """While Inductor compiles or loads: its files go to `folder`, and its settings are those that we rely on.

    Args:
        folder: exists.
        threads: how many C++ compilers may run at a time.
    """
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    headers = {name: getattr(codecache, name, None) for name in ("_HEADER_DIR", "_HEADER_LOCK_DIR")}
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    for name, inside in (("_HEADER_DIR", "headers"), ("_HEADER_LOCK_DIR", "headers/locks")):
        if headers[name] is not None:
            setattr(codecache, name, os.path.join(folder, inside))
    try:
        with inductor_config.patch(
            {
                "compile_threads": threads,
                # What we keep on disk is a compiled region; Inductor's own index would say the same once more.
                "fx_graph_cache": False,
                "size_asserts": False,
                "alignment_asserts": False,
                # A contracted multiply-add rounds once: random numbers would get other bits.
                "cpp.enable_floating_point_contract_flag": "off",
                "cpp.enable_unsafe_math_opt_flag": False,
            }
        ):
            yield
    finally:
        for name, value in headers.items():
            if value is not None:
                setattr(codecache, name, value)
        if before is None:
            os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


@contextlib.contextmanager
def headers_ahead() -> Iterator[None]:
    """Compiles the header that every C++ kernel includes in a thread of its own, while Inductor is still at work."""
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(_compile_headers,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _compile_headers() -> None:
    # The comment tells Inductor that it is one of the vectorized kernels, whose header has flags of its own.
    source = '#include <torch/csrc/inductor/cpp_prefix.h>\n// at::vec::\nextern "C" void kernel(float* x) {}\n'
    with contextlib.suppress(Exception):
        codecache.CppPythonBindingsCodeCache.load_pybinding(["float*"], source)


def compile_graph(module: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], fake_mode: Any) -> Compiled:
    """A graph, functional but for copies into placeholders, through Inductor; results keep their strides.

    Returns:
        an object for `to_bytes`, whose `current_callable` takes a list of tensors, which it empties.
    """
    output = next(iter(module.graph.find_nodes(op="output")))
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    with tracing(TracingContext(fake_mode)), torch.no_grad():
        return compile_fx_inner(module, list(inputs))


def to_bytes(compiled: Compiled) -> bytes:
    """A compiled graph as bytes; the machine code is not in it, but found or made again from its source."""
    bare = copy.copy(compiled)
    bare.prepare_for_serialization()
    return pickle.dumps(bare)


def from_bytes(data: bytes, inputs: Sequence[torch.Tensor]) -> Compiled:
    """What `to_bytes` was given, ready to be called."""
    compiled = pickle.loads(data)
    constants = CompiledFxGraphConstants()
    # Looking for the compiled header takes a second, and the machine code is most likely there.
    find = getattr(codecache, "_precompile_header", None)
    if find is not None:
        codecache._precompile_header = lambda *args, **kwargs: None  # type: ignore[assignment]
    try:
        compiled.after_deserialization(constants)
        compiled.post_compile(list(inputs), constants, compiled.fx_kwargs)
    finally:
        if find is not None:
            codecache._precompile_header = find
    return compiled


def index_loader(value: Any) -> Callable[[int], Any]:
    """Reads element i of a one-dimensional value inside a pointwise kernel."""
    import sympy  # type: ignore[import-untyped]

    load = value.make_loader()
    return lambda i: load([sympy.Integer(i)])
