"""Settings read from the environment, each time they are asked for.

| variable | meaning |
|---|---|
| `PTRAINX_LOG` | comma-separated topics to log; `retrace` tells what is traced, and why again |
| `PTRAINX_CHECK_INPUTS` | `1`: compare plain inputs between ranks at every call, not just the first |
| `PTRAINX_CHECK_PASSES` | `1`: a step's first call runs its graph after each pass too, and compares the results |
| `PTRAINX_AGREEMENT_TIMEOUT` | seconds that ranks wait for each other before a graph's first run (default 120) |
| `PTRAINX_SHARED_MEMORY` | `0`: CPU ranks of one host send through gloo's sockets, not through shared memory |
| `PTRAINX_COLLECTIVE_TIMEOUT` | seconds that a rank waits in a collective through shared memory (default 1800) |
| `PTRAINX_CHECKPOINT_TIMEOUT` | seconds of silence after which a rank is taken for dead in a save (default 300) |
| `PTRAINX_CACHE_DIR` | where compiled code is kept (default: `ptrainx` in the user's cache folder) |
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

__all__ = [
    "agreement_timeout",
    "cache_dir",
    "check_inputs",
    "check_passes",
    "checkpoint_timeout",
    "collective_timeout",
    "log",
    "shared_memory",
]


def _logger() -> logging.Logger:
    logger = logging.getLogger("ptrainx")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("ptrainx: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    return logger


def log(topic: str, message: str) -> None:
    """Writes a message if `PTRAINX_LOG` names its topic."""
    if topic in os.environ.get("PTRAINX_LOG", "").split(","):
        _logger().info("%s: %s", topic, message)


def check_inputs() -> bool:
    """Whether plain inputs are compared between ranks at every call."""
    return os.environ.get("PTRAINX_CHECK_INPUTS") == "1"


def check_passes() -> bool:
    """Whether a step's first call compares its results after each pass of the compiler."""
    return os.environ.get("PTRAINX_CHECK_PASSES") == "1"


def agreement_timeout() -> float:
    """Seconds to wait for the other ranks to agree on a graph."""
    return float(os.environ.get("PTRAINX_AGREEMENT_TIMEOUT", "120"))


def shared_memory() -> bool:
    """Whether CPU ranks of one host may exchange data through shared memory."""
    return os.environ.get("PTRAINX_SHARED_MEMORY") != "0"


def collective_timeout() -> float:
    """Seconds to wait for the other ranks in a collective through shared memory."""
    return float(os.environ.get("PTRAINX_COLLECTIVE_TIMEOUT", "1800"))


def checkpoint_timeout() -> float:
    """Seconds to wait for a sign of life of another rank while a checkpoint is written or read."""
    return float(os.environ.get("PTRAINX_CHECKPOINT_TIMEOUT", "300"))


def cache_dir() -> Path:
    """The folder that keeps compiled code: `PTRAINX_CACHE_DIR`, else `ptrainx` in `XDG_CACHE_HOME` or `~/.cache`."""
    named = os.environ.get("PTRAINX_CACHE_DIR")
    if named:
        return Path(named).expanduser().absolute()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "ptrainx"
    except RuntimeError:  # A user without a home, as in some containers.
        return Path(tempfile.gettempdir()) / f"ptrainx-{os.getuid() if hasattr(os, 'getuid') else 'cache'}"
