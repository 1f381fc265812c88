"""Executes `digits.py` as a notebook and writes it with its outputs as `digits.ipynb`.

    python examples/digits/render.py

`digits.py` is the source; a notebook server with jupytext opens it as it is. The kernel is this interpreter's own: no
kernel has to be installed. What changes from run to run (times, cell ids) is left out.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient

__all__ = ["HERE", "execute", "read"]

HERE = Path(__file__).resolve().parent


def read(source: Path = HERE / "digits.py") -> Any:
    """The notebook that a percent-format file describes, without outputs."""
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02}"
    notebook.metadata.pop("jupytext", None)
    return notebook


def execute(notebook: Any, timeout: int = 300) -> Any:
    """The notebook with its outputs, from a fresh kernel that runs in this folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Without kernel folders only "python3" is known: this interpreter.
        specs = KernelSpecManager(kernel_dirs=[], ensure_native_kernel=True)
        manager = AsyncKernelManager(kernel_spec_manager=specs, connection_file=str(Path(folder, "kernel.json")))
        if os.name == "posix":  # sockets in the folder, not on the network
            manager.transport, manager.ip = "ipc", str(Path(folder, "socket"))
        where = {"metadata": {"path": str(HERE)}}
        client = NotebookClient(
            notebook, km=manager, timeout=timeout, record_timing=False, coalesce_streams=True, resources=where
        )
        try:
            client.execute(env={**os.environ, "IPYTHONDIR": folder})
        finally:
            run_sync(manager.shutdown_kernel)(now=True)
    notebook.metadata.pop("language_info", None)
    return notebook


if __name__ == "__main__":
    nbformat.write(execute(read()), HERE / "digits.ipynb")
