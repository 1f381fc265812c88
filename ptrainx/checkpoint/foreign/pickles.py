"""Reading a pickle that others wrote, in which only what is known may be named.

A pickle is a program for a small machine: it may call any function by name, and ask for any amount of memory. Here its
instructions are looked through first: those that data needs are allowed, with lengths within the file. Then names stand
for what the reader gives them, and for nothing else.

Source: CPython's `Lib/pickletools.py`.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["read_pickle"]

_ALLOWED = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT
    SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES
    EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS
    MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD BINPERSID
"""
_PUT, _GLOBAL, _STOP = b"r"[0], b"c"[0], b"."[0]
_LENGTHS = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4U: 4}
_LENGTHS[pickletools.TAKEN_FROM_ARGUMENT8U] = 8
_ARGUMENTS: dict[int, int] = {}
"""Code of an instruction that is allowed -> bytes of its argument; negative: bytes of the argument's length."""

for _code in pickletools.opcodes:
    if _code.name in _ALLOWED.split():
        _size = 0 if _code.arg is None else _code.arg.n
        _ARGUMENTS[ord(_code.code)] = _size if _size >= 0 else -_LENGTHS.get(_size, 0)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, known: Mapping[tuple[str, str], Any], storage: Callable[[Any], Any] | None):
        super().__init__(io.BytesIO(data))
        self._known, self._storage = known, storage

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) not in self._known:
            raise ValueError(f"it names {module}.{name}, which has no place in it")
        return self._known[module, name]

    def persistent_load(self, pid: Any) -> Any:
        if self._storage is None:
            raise ValueError("it speaks of storages")
        return self._storage(pid)


def read_pickle(data: bytes, known: Mapping[tuple[str, str], Any], storage: Callable[[Any], Any] | None = None) -> Any:
    """What a pickle holds.

    Args:
        data: all of it.
        known: (module, name) -> what the name stands for; dtypes of torch besides.
        storage: makes what a persistent id stands for.

    Raises:
        ValueError: it is no pickle, or one that names or asks for something else.
    """
    _look_through(data)
    try:
        return _Unpickler(data, known, storage).load()
    except ValueError:
        raise
    except Exception as error:  # whatever a damaged pickle leads to
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _look_through(data: bytes) -> None:
    place, end = 0, len(data)
    while place < end:
        code = data[place]
        if code == _STOP:
            return
        size = _ARGUMENTS.get(code)
        if size is None:
            raise ValueError(f"byte {place:,} is no instruction that data needs: {code:#x}")
        place += 1
        if code == _GLOBAL:
            for _ in range(2):
                place = data.find(b"\n", place) + 1 or end
        elif size < 0:
            place += int.from_bytes(data[place : place - size], "little") - size
        else:
            if code == _PUT and int.from_bytes(data[place : place + 4], "little") > end:
                raise ValueError(f"byte {place:,} asks for more memory than the file is long")
            place += size
    raise ValueError("it ends early")
