"""The inductor backend: regions of a rank's graph become calls of code that Inductor has compiled.

Enters: a graph after the passes. Leaves: the same with each region replaced by one call; collectives, loops and their
order stay ours. A region is found again by what it says, on what shapes, under which torch, code and processor: in this
process, so that repeated layers and simulated ranks share one, and in the cache folder. Next stage: `lower`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import operator
import os
import pickle
import platform
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ptrainx.compile.calls import owned_operands
from ptrainx.compile.disk_cache import DiskCache, open_cache
from ptrainx.compile.graph import called_bodies, loops_of
from ptrainx.compile.regions import Region, canonical, cut, put_in_place, region_module
from ptrainx.compile.stage_loops import stage_loop
from ptrainx.compile.trace import RankGraph
from ptrainx.core import flags, torch_compat_code
from ptrainx.core import torch_compat as tc

__all__ = ["CompileReport", "CompiledRegion", "FallbackWarning", "compile_regions", "no_compiler"]

aten = torch.ops.aten
_CODE = (
    "compile/inductor.py",
    "compile/regions.py",
    "compile/lowerings.py",
    "core/torch_compat_code.py",
    "core/torch_compat_inductor.py",
)
_KIND = "regions"


class FallbackWarning(UserWarning):
    """What was to be compiled runs uncompiled."""


@dataclasses.dataclass
class CompileReport:
    """What compiling a program took.

    Attributes:
        regions: calls of compiled code in the graphs of all ranks that this process plays.
        compiled: how many of them had to be compiled.
        from_disk: how many were found in the cache folder; the others are repetitions of one in this process.
        failed: how many run uncompiled.
        seconds: in all.
    """

    regions: int = 0
    compiled: int = 0
    from_disk: int = 0
    failed: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        shared = self.regions - self.compiled - self.from_disk
        parts = [f"{self.compiled} compiled", f"{self.from_disk} from the cache folder", f"{shared} shared"]
        parts += [f"{self.failed} not compiled"] if self.failed else []
        return f"{self.regions} regions: {', '.join(parts)}; {self.seconds:.1f} s"


class CompiledRegion:
    """A region's code: takes a list of tensors, which it empties, and returns the region's outputs.

    Inductor may let two outputs share memory, or an output and an input, where the graph did not. What follows relies
    on what the graph says, so the first call looks, and such outputs are copied from then on.

    Args:
        code: has a `current_callable` that takes a list of tensors, which it empties.
        region: what was compiled.
    """

    boxed = True

    def __init__(self, code: Any, region: Region):
        self._code = code  # Its parts live as long as it does.
        self._run = code.current_callable
        self._overwrites = region.overwrites
        self._allowed = _shared_pairs(region)
        self._copied: tuple[int, ...] | None = None
        self.__name__ = f"region_{len(region.nodes)}_operators"

    def __call__(self, args: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self._copied is None:
            return self._first_call(args)
        taken = [args[source] for _, source in self._overwrites]
        outs = self._run(args)
        if taken:
            outs = self._with_taken(outs, taken)
        if self._copied:
            outs = [out.clone() if i in self._copied else out for i, out in enumerate(outs)]
        return outs

    def _with_taken(self, outs: Sequence[torch.Tensor], taken: list[torch.Tensor]) -> list[torch.Tensor]:
        merged = list(outs)
        for (position, _), tensor in zip(self._overwrites, taken):
            merged.insert(position, tensor)
        return merged

    def _first_call(self, args: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        held, taken = list(args), [args[source] for _, source in self._overwrites]
        outs = self._with_taken(self._run(args), taken)
        overwritten = dict(self._overwrites)
        owner: dict[int, int] = {tc.storage_id(tensor): -1 for tensor in held}
        copied = []
        for i, out in enumerate(outs):
            if i in overwritten:
                continue
            first = owner.setdefault(tc.storage_id(out), i)
            if first != i and (first, i) not in self._allowed:
                copied.append(i)
        self._copied = tuple(copied)
        return [out.clone() if i in copied else out for i, out in enumerate(outs)]


def _shared_pairs(region: Region) -> frozenset[tuple[int, int]]:
    """Pairs of outputs that share memory in the graph: a value and its views."""
    roots = [tc.storage_id(node.meta["val"]) for node in region.outputs]
    n = len(roots)
    return frozenset((i, j) for i in range(n) for j in range(i + 1, n) if roots[i] == roots[j])


_known: weakref.WeakValueDictionary[str, CompiledRegion] = weakref.WeakValueDictionary()
# Inductor keeps its state in globals.
_lock = threading.Lock()


@dataclasses.dataclass
class _Work:
    """What the regions of one graph share.

    Attributes:
        fake_mode: of the graph's values.
        report: counts what is done.
        cache: where code is found and kept.
        settings: left when the work is done.
    """

    fake_mode: Any
    report: CompileReport
    cache: DiskCache
    settings: contextlib.ExitStack

    @property
    def folder(self) -> Path:
        """Of Inductor's files."""
        return self.cache.subfolder("inductor")

    @functools.cached_property
    def inductor(self) -> Any:
        """Inductor with our settings, from the first use on: importing it takes a second, and code that is in the
        cache folder seldom needs it."""
        from ptrainx.core import torch_compat_inductor as inductor

        self.settings.enter_context(inductor.inductor_settings(str(self.folder), _threads()))
        return inductor


def compile_regions(graph: RankGraph, donated: Sequence[int], report: CompileReport) -> None:
    """Puts compiled regions into a rank's graph, and into the pieces of its loops.

    Args:
        graph: after the passes; changed.
        donated: indices of placeholders whose memory may be given to results.
        report: counts what is done.
    """
    begun = time.perf_counter()
    with _lock, contextlib.ExitStack() as settings:
        _compile_module(graph.module, set(donated), _Work(graph.fake_mode, report, open_cache(), settings))
    report.seconds += time.perf_counter() - begun


def _compile_module(module: GraphModule, donated: set[int], work: _Work) -> None:
    for loop in loops_of(module.graph):
        # Where `lower` finds them.
        staged = loop.node.meta["staged"] = stage_loop(loop.node)
        for piece, owned in ((staged.ahead, ()), (staged.core, staged.owned), (staged.late, ())):
            if piece is not None:
                _compile_module(piece, set(owned), work)
    owned_by = owned_operands(module.graph, donated)
    for name, body in called_bodies(module.graph).items():
        _compile_module(body, set(owned_by[name]), work)
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    # The last first: a region's outputs are inputs of later ones.
    for region in reversed(cut(module.graph, [n for i, n in enumerate(placeholders) if i in donated])):
        target = _compiled(region, module, work)
        if target is not None:
            put_in_place(module.graph, region, target)
    module.graph.lint()
    module.recompile()


def _compiled(region: Region, owner: GraphModule, work: _Work) -> CompiledRegion | None:
    key = hashlib.blake2b(f"{_surroundings()}\n{canonical(region)}".encode(), digest_size=20).hexdigest()
    known = _known.get(key)
    work.report.regions += 1
    if known is not None:
        return known
    code = _load(key, region, work)
    if code is None:
        code = _make(key, region, owner, work)
    if code is None:
        work.report.regions -= 1
        work.report.failed += 1
        return None
    found = CompiledRegion(code, region)
    _known[key] = found
    return found


def _load(key: str, region: Region, work: _Work) -> Any:
    """A region's code from the cache folder; None if it is not there, or can't be read."""
    data = work.cache.read(_KIND, key)
    if data is None:
        return None
    try:
        alone, whole = pickle.loads(data)
        code = _load_alone(alone, work)
        if code is None:
            code = work.inductor.from_bytes(whole, [node.meta["val"] for node in region.inputs])
            _keep(key, region, code, whole, work)
    except Exception as error:
        flags.log("cache", f"an entry is made again: {error}")
        return None
    work.report.from_disk += 1
    return code


def _load_alone(alone: bytes | None, work: _Work) -> Any:
    """A region's code without Inductor; None where its machine code has to be found or made by Inductor."""
    if alone is None:
        return None
    try:
        return torch_compat_code.load(alone, work.folder)
    except Exception as error:
        flags.log("cache", f"Inductor looks for an entry's machine code: {error}")
        return None


def _make(key: str, region: Region, owner: GraphModule, work: _Work) -> Any:
    """A region's code, compiled and kept; None, with a warning, if Inductor can't."""
    try:
        with work.inductor.headers_ahead() if _needs_headers(region) else contextlib.nullcontext():
            code = _compile(region, owner, work)
    except Exception as error:
        _tell_failure(region, error)
        return None
    work.report.compiled += 1
    try:
        _keep(key, region, code, work.inductor.to_bytes(code), work)
    except Exception as error:
        flags.log("cache", f"an entry can't be kept: {error}")
    return code


def _keep(key: str, region: Region, code: Any, whole: bytes, work: _Work) -> None:
    """Writes an entry: the code in the form that needs no Inductor, or None, and as Inductor reads it."""
    alone = torch_compat_code.standalone(code, work.folder) if _needs_headers(region) else None
    if alone is not None or work.cache.read(_KIND, key) is None:
        work.cache.write(_KIND, key, pickle.dumps((alone, whole)))


def _needs_headers(region: Region) -> bool:
    return all(node.meta["val"].device.type == "cpu" for node in region.outputs)


def _compile(region: Region, owner: GraphModule, work: _Work) -> Any:
    # Importing this registers our operators with Inductor.
    from ptrainx.compile.lowerings import settle_scalars

    inputs = [node.meta["val"] for node in region.inputs]
    module = region_module(region, owner)
    with torch.fx.traceback.preserve_node_meta(False), work.fake_mode, torch.no_grad():
        traced = make_fx(
            functionalize(torch.fx.Interpreter(module).run),
            decomposition_table=work.inductor.decompositions(),
            tracing_mode="real",
        )(*inputs)
    _write_overwrites(traced, region)
    settle_scalars(traced.graph)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return work.inductor.compile_graph(traced, inputs, work.fake_mode)


def _write_overwrites(module: GraphModule, region: Region) -> None:
    """Outputs that take an input's memory are copied there, which Inductor makes the place where they are computed."""
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    output = next(iter(module.graph.find_nodes(op="output")))
    results = list(output.args[0])
    with module.graph.inserting_before(output):
        for i, j in region.overwrites:
            copy = module.graph.call_function(aten.copy_.default, (placeholders[j], results[i]))
            copy.meta["val"] = placeholders[j].meta["val"]
    taken = dict(region.overwrites)
    output.args = (tuple(r for i, r in enumerate(results) if i not in taken),)


def _tell_failure(region: Region, error: Exception) -> None:
    names = [str(n.target) for n in region.nodes if n.target is not operator.getitem]
    shown = ", ".join(dict.fromkeys(names[:6])) + (", ..." if len(names) > 6 else "")
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    warnings.warn(
        f"Inductor can't compile a region of {len(names)} operators ({shown}), which runs uncompiled: {first}",
        FallbackWarning,
        stacklevel=2,
    )


def no_compiler(device: torch.device) -> str | None:
    """What Inductor would need on a device and does not find; None if all is there."""
    return torch_compat_code.compiler_problem(device.type)


def _threads() -> int:
    """How many C++ compilers run at a time; they are threads of this process and end with the compilation."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, min(8, len(os.sched_getaffinity(0))))
    return max(1, min(8, os.cpu_count() or 1))


def _surroundings() -> str:
    """Everything but the region itself that its code depends on."""
    versions = f"{torch.__version__} {sys.implementation.cache_tag}"
    return f"{versions} {_processor()} {torch.get_num_threads()} threads, code {code_version()}"


@functools.cache
def _processor() -> str:
    """The instructions that there are, and the widest that torch uses: what Inductor compiles for."""
    try:
        with open("/proc/cpuinfo") as info:
            # "flags" on x86, "Features" on Arm.
            lines = {line.partition(":")[2].strip() for line in info if line.startswith(("flags", "Features"))}
    except OSError:
        lines = {platform.processor()}
    digest = hashlib.blake2b(repr(sorted(lines)).encode(), digest_size=12).hexdigest()
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {digest}"


@functools.cache
def code_version() -> str:
    """A digest of those files of ours that decide what a region is compiled to."""
    root = Path(__file__).resolve().parents[1]
    files = [root / name for name in _CODE] + sorted((root / "ops" / "random").glob("*.py"))
    digest = hashlib.blake2b(digest_size=12)
    for file in files:
        digest.update(file.read_bytes() if file.exists() else b"")
    return digest.hexdigest()
