"""Examples of one file as modules, for tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

__all__ = ["load_example"]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load_example(path: str) -> Any:
    """The module of `examples/<path>`, under a name that no other module has."""
    name = "examples_" + path.replace("/", "_").removesuffix(".py")
    if name not in sys.modules:
        spec: Any = importlib.util.spec_from_file_location(name, EXAMPLES / path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]
