"""Python values as text, exactly: `int float bool complex str bytes`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

__all__ = ["PYTHON", "from_text", "to_text"]


class _Form(NamedTuple):
    write: Callable[[Any], str]
    read: Callable[[str], Any]


def _read_float(text: str) -> float:
    # float.fromhex takes more than float.hex gives, also what overflows.
    try:
        return float.fromhex(text)
    except OverflowError as error:
        raise ValueError(str(error)) from error


def _read_complex(text: str) -> complex:
    real, _, imaginary = text.partition(" ")
    return complex(_read_float(real), _read_float(imaginary))


def _read_int(text: str) -> int:
    if not re.fullmatch(r"-?0x[0-9a-f]+", text):
        raise ValueError("an int is written in hexadecimal")
    return int(text, 16)


def _read_bool(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError("a bool is True or False")
    return text == "True"


PYTHON: Mapping[str, _Form] = {
    "bool": _Form(str, _read_bool),
    "int": _Form(hex, _read_int),
    "float": _Form(float.hex, _read_float),
    "complex": _Form(lambda z: f"{z.real.hex()} {z.imag.hex()}", _read_complex),
    "str": _Form(str, str),
    "bytes": _Form(bytes.hex, bytes.fromhex),
}
"""Type name -> how its values are written and read."""


def to_text(value: Any) -> tuple[str, str] | None:
    """(type, text) of a value of exactly one of these types; None for all else.

    >>> to_text(255)
    ('int', '0xff')
    """
    kind = type(value).__name__
    form = PYTHON.get(kind) if type(value) in (bool, int, float, complex, str, bytes) else None
    return None if form is None else (kind, form.write(value))


def from_text(kind: str, text: str) -> Any:
    """The value again.

    Raises:
        ValueError: the text is of no value of this type.

    >>> from_text("float", to_text(0.1)[1])
    0.1
    """
    return PYTHON[kind].read(text)
