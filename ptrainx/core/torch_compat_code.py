"""Private torch names about compiled code: what Inductor has generated for the CPU, loaded without Inductor.

Importing Inductor takes longer than everything else that a process with a full cache folder has to do. The code that it
writes needs little of it: a class with a method `call`, which allocates, calls operators and calls kernels, each a
shared library. `standalone` keeps the class and says where the libraries lie, if that is all there is; `load` puts
them together again.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._triton import has_triton

__all__ = ["Standalone", "compiler_problem", "load", "standalone"]

_NAMESPACES = frozenset({"aten", "mkldnn", "prims"})
"""Operators that torch has without Inductor."""


class Standalone(NamedTuple):
    """Code that was loaded: its callable takes a list of tensors, which it empties."""

    current_callable: Callable[[list[torch.Tensor]], Any]


def standalone(compiled: Any, folder: Path) -> bytes | None:
    """Compiled code in a form that `load` understands; None if it takes more than that form has.

    Args:
        compiled: what `compile_fx_inner` gave.
        folder: of Inductor's files.
    """
    method = compiled.current_callable
    names: dict[str, Any] = getattr(method, "__globals__", None) or getattr(method, "__func__", method).__globals__
    runner = _class_of(compiled.source_code, type(getattr(method, "__self__", None)).__name__)
    if runner is None or getattr(method.__self__, "partitions", None) or not _only_known_attributes(runner, names):
        return None
    provided, kernels = _provided(), {}
    for name in _read_from_outside(runner):
        if name in provided and (name == "extern_kernels" or names.get(name) is provided[name]):
            continue
        file = _library_of(names.get(name))
        if file is None or not file.is_relative_to(folder):
            return None
        kernels[name] = [names[name].__self__.__name__, str(file.relative_to(folder)), _digest(file)]
    return json.dumps({"class": runner.name, "source": ast.unparse(runner), "kernels": kernels}).encode()


def load(data: bytes, folder: Path) -> Standalone:
    """What `standalone` was given, ready to be called.

    Raises:
        OSError, ImportError, ValueError: a library is not there, or no longer what it was; that one is removed.
    """
    parts = json.loads(data)
    names = _provided()
    for name, (module, file, digest) in parts["kernels"].items():
        path = folder / file
        if _digest(path) != digest:
            path.unlink()  # Or Inductor would take it as it is.
            raise ValueError(f"{path} had changed")
        names[name] = getattr(_library(module, path), module.rpartition(".")[2])
    exec(compile(parts["source"], f"<compiled code in {folder}>", "exec"), names)
    return Standalone(names[parts["class"]](partitions=[]).call)


def _provided() -> dict[str, Any]:
    """The names that generated code finds outside its class, beside its kernels."""
    guards: Any = torch._C._dynamo.guards
    tensors = {
        "assert_alignment": "assert_alignment",
        "assert_size_stride": "assert_size_stride",
        "empty_strided_cpu": "_empty_strided_cpu",
        "reinterpret_tensor": "_reinterpret_tensor",
    }
    return {
        "torch": torch,
        "aten": torch.ops.aten,
        "device": torch.device,
        "empty_strided": torch.empty_strided,
        "extern_kernels": torch,
        "inf": math.inf,
        "math": math,
        "nan": math.nan,
        **{name: getattr(guards, private) for name, private in tensors.items() if hasattr(guards, private)},
    }


def _class_of(source: str, name: str) -> ast.ClassDef | None:
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name]
    return classes[0] if len(classes) == 1 else None


def _read_from_outside(tree: ast.AST) -> list[str]:
    """Names that are read and neither set there nor Python's own."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    own = {node.id for node in found if not isinstance(node.ctx, ast.Load)}
    own |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return list(dict.fromkeys(node.id for node in found if node.id not in own and not hasattr(builtins, node.id)))


def _only_known_attributes(tree: ast.AST, names: dict[str, Any]) -> bool:
    """Whether kernels from outside are torch's own functions, and operators those of torch."""
    kernels = names.get("extern_kernels")
    for owner, attribute in _attributes(tree):
        if owner == "extern_kernels" and getattr(kernels, attribute, None) is not getattr(torch, attribute, kernels):
            return False
        if owner == "torch.ops" and attribute not in _NAMESPACES:
            return False
        if owner == "torch" and (attribute.startswith("_") or not hasattr(torch, attribute)):
            return False
    return not any(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.walk(tree))


def _attributes(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(what is on the left of a dot, what on the right), where the left is a name or two."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Name, ast.Attribute)):
            yield ast.unparse(node.value), node.attr


def _library_of(kernel: Any) -> Path | None:
    """The file of the shared library that a function comes from."""
    module = getattr(kernel, "__self__", None)
    if not isinstance(kernel, types.BuiltinFunctionType) or not isinstance(module, types.ModuleType):
        return None
    file = getattr(module, "__file__", None)
    return None if file is None else Path(file)


def _library(name: str, path: Path) -> Any:
    """A shared library as a Python module, loaded as Inductor does, which shares it."""
    known = sys.modules.get(name)
    if known is not None:
        return known
    # Where a library finds the function that reads a tensor's address.
    address = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(address)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no library that Python can load")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module


def _digest(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=20).hexdigest()


def compiler_problem(device: str) -> str | None:
    """What Inductor lacks to compile for a kind of device; None if it has all."""
    if device != "cpu" and not has_triton():
        return f"Triton, which compiles for {device}, is not installed"
    if not any(_runs(compiler) for compiler in _compilers()):
        return "there is no C++ compiler (g++ or clang++, or the one that CXX names)"
    return None


def _compilers() -> list[str]:
    """Where Inductor looks for a C++ compiler: in its settings, if it was imported, or where they come from."""
    settings = sys.modules.get("torch._inductor.config")
    if settings is None:
        return [os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")]
    chosen = settings.cpp.cxx
    return [name for name in (chosen if isinstance(chosen, (list, tuple)) else [chosen]) if name]


def _runs(compiler: str) -> bool:
    try:
        subprocess.run([compiler, "--version"], check=True, capture_output=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return True
