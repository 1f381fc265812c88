"""The header of a safetensors file: eight bytes of length, then JSON, which says what each range of the data is.

See https://huggingface.co/docs/safetensors. Any safetensors reader opens the files of a checkpoint.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

from ptrainx.checkpoint.boxes import Box
from ptrainx.checkpoint.dtypes import DTYPES, stored_shape

__all__ = ["header", "header_problem"]


def header(tensors: Sequence[tuple[str, str, Box]]) -> tuple[bytes, list[int]]:
    """The header of a file with these tensors in this order, and the offset in the file at which each begins.

    Args:
        tensors: (name, dtype as in `DTYPES`, which part).
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, place = [], 0
    for name, dtype, box in tensors:
        end = place + box.size * DTYPES[dtype].itemsize
        entries[name] = _entry(dtype, box, place, end)
        offsets.append(place)
        place = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, [8 + len(text) + offset for offset in offsets]


def _entry(dtype: str, box: Box, begin: int, end: int) -> dict[str, Any]:
    shape = list(stored_shape(dtype, box.shape))
    return {"dtype": DTYPES[dtype].code, "shape": shape, "data_offsets": [begin, end]}


def header_problem(data: bytes, tensors: Sequence[tuple[str, str, Box, int]]) -> str | None:
    """What a file's header says otherwise than the manifest; None if they agree.

    Args:
        data: all that comes before the file's data.
        tensors: (name, dtype, which part, offset in the file).
    """
    try:
        found = json.loads(data[8:])
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        return "its header is no JSON record"
    found.pop("__metadata__", None)
    if data[:8] != struct.pack("<Q", len(data) - 8):
        return "its header has another length than it says"
    for name, dtype, box, begin in tensors:
        place = begin - len(data)
        if found.pop(name, None) != _entry(dtype, box, place, place + box.size * DTYPES[dtype].itemsize):
            return f"its header has not {name} as the manifest has it"
    return f"its header has {len(found)} tensors more" if found else None
