"""What the variables of a running graph hold, as `memory` follows it: buffers, and collectives under way."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import Node

from ptrainx.compile.memory_report import Holder

__all__ = ["Buffer", "Pending", "Value", "buffers_of", "bytes_of_storage", "bytes_of_value"]


@dataclasses.dataclass(eq=False)
class Buffer:
    """Memory that tensors share; `refs` counts the variables that hold one."""

    bytes: int
    holder: Holder
    refs: int = 0


@dataclasses.dataclass
class Pending:
    """A collective under way: what becomes its result, and what it keeps besides.

    Attributes:
        parts: of how many parts the result is added up, in memory of its own, when it is waited for; 0 if it is not.
    """

    result: Buffer
    held: list[Buffer]
    parts: int = 0


Value = Any
"""A `Buffer`, a `Pending`, None for what is no tensor, or a list of such."""


def buffers_of(value: Value) -> list[Buffer]:
    """The buffers that a variable holds."""
    if isinstance(value, Buffer):
        return [value]
    if isinstance(value, Pending):
        return [value.result, *value.held]
    if isinstance(value, list):
        return [buffer for item in value for buffer in buffers_of(item)]
    return []


def bytes_of_value(value: torch.Tensor) -> int:
    """The size of a tensor's elements."""
    return value.numel() * value.element_size()


def bytes_of_storage(node: Node) -> int:
    """The size of the memory in which a node's value lies."""
    value = node.meta.get("val")
    return value.untyped_storage().nbytes() if isinstance(value, torch.Tensor) else 0
