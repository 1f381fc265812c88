"""The modules of `examples/gpt`, which import each other by bare names, for tests in any process."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__all__ = ["FOLDER", "TINY", "load"]

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "gpt"
TINY = ["--width", "16", "--layers", "1", "--heads", "4", "--context", "16", "--batch", "8", "--lr", "1e-3"]


@functools.cache
def load() -> Any:
    """All modules of the example as attributes, imported as they are when its folder comes first on the path.

    Other programs have modules of the same names: afterwards `sys.modules` is as it was.
    """
    names = sorted(file.stem for file in FOLDER.glob("*.py"))
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(FOLDER))
    try:
        return SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(FOLDER))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(others)
