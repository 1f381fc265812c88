"""`MetricsWriter`: one JSON object a line, on disk as soon as it is written; `read_metrics` reads it back."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ptrainx.core.avals import describe
from ptrainx.core.errors import DataError, InputError
from ptrainx.mesh.world import current_world

__all__ = ["MetricsWriter", "read_metrics"]


class MetricsWriter:
    """Writes records to a JSON-lines file, on rank 0; on other ranks it does nothing.

    Every line is flushed, so that a run can be watched, and one that was killed has lost nothing but its last line.

    Args:
        path: the file, usually `metrics.jsonl`; folders are made, a file that is there is replaced.

    Raises:
        DataError: the file can't be written.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "metrics.jsonl")
    >>> with MetricsWriter(path) as metrics:
    ...     metrics.write({"step": 1, "loss": torch.tensor(0.5)})
    >>> path.read_text()
    '{"step": 1, "loss": 0.5}\\n'
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._file = None
        if current_world().rank == 0:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("w", encoding="utf-8")
            except OSError as error:
                raise DataError(f"{self.path} can't be written: {error.strerror}", fix="choose another path") from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a line.

        Args:
            record: names to numbers, strings, 0-d tensors and arrays, and lists and dicts of those. JSON has no NaN
                and no infinity: they become null.

        Raises:
            InputError: a value is none of these, or the writer has been closed.
        """
        if current_world().rank != 0:
            return
        if self._file is None:
            raise InputError(f"{self.path} has been closed", fix="write inside `with MetricsWriter(...)`")
        self._file.write(json.dumps({str(name): _plain(value, str(name)) for name, value in record.items()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file; done by `with` too."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _plain(value: Any, name: str) -> Any:
    """The value as JSON has it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part, f"{name}.{key}") for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part, f"{name}[{i}]") for i, part in enumerate(value)]
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and not isinstance(value, DTensor) and value.ndim == 0:
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    got = describe(value) if isinstance(value, (torch.Tensor, np.ndarray)) else type(value).__name__
    raise InputError(
        f"MetricsWriter: {name} can't be written as JSON",
        got=got,
        expected="a number, a string, a 0-d tensor, or a list or dict of those",
        fix="reduce it to a number, or take it off the mesh with px.device_get and .tolist()",
    )


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The records of a JSON-lines file, in order; a last line that was cut off by a kill is left out.

    Raises:
        DataError: the file is missing, holds no record, or holds a line that is no JSON object.
    """
    file = Path(path)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{file} can't be read: {error.strerror}", fix="pass the metrics.jsonl of a run") from error
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) and records:
                break
            raise DataError(
                f"line {number} of {file} is no JSON: {error}",
                got=repr(line[:80]),
                fix="pass a metrics.jsonl that px.observe has written: one JSON object a line",
            ) from error
        if not isinstance(record, dict):
            raise DataError(
                f"line {number} of {file} is no JSON object",
                got=repr(line[:80]),
                fix="pass a metrics.jsonl that px.observe has written: one JSON object a line",
            )
        records.append(record)
    if not records:
        raise DataError(f"{file} holds no records", fix="pass the metrics.jsonl of a run that has made a step")
    return records
