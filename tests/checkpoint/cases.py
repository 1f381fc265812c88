"""Trees that the tests of this room save, and how two trees are compared: bit for bit, types included."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

import ptrainx as px
from ptrainx import P

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]


class Moments(NamedTuple):
    """A NamedTuple node."""

    mu: Any
    nu: Any


@px.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
    """A dataclass node with a static field."""

    w: Any
    b: Any = None
    kind: str = dataclasses.field(default="dense", metadata={"static": True})


def random_bytes(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of any bits at all (of a bool: 0 and 1)."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def every_kind() -> dict[Any, Any]:
    """A tree with every kind of leaf and node."""
    tied = torch.arange(12.0).reshape(3, 4)
    return {
        "dtypes": {str(dtype): random_bytes(3, 5, dtype=dtype) for dtype in DTYPES},
        "shapes": [torch.tensor(2.5), torch.empty(0), torch.empty(3, 0, 2, dtype=torch.int8), tied[:, 1], tied.t()],
        "tied": {"a": tied, "b": (tied, tied.clone())},
        "python": [True, False, 0, -(2**70), 2.5, float("inf"), -0.0, 1e-320, 1 - 2j, "text \u00e9\n", b"\x00\xff"],
        "numpy": [
            np.arange(6, dtype="<i2").reshape(2, 3),
            np.arange(3, dtype=">f4"),
            np.float16(1.5),
            np.zeros((0, 2)),
        ],
        "nodes": Layer(Moments({1: torch.ones(2), "1": torch.zeros(2)}, None), [None, {}, (), []]),
        "key": px.random.key(7),
        ("a", 1): torch.tensor([1 + 2j]).conj(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }


def bits(value: Any) -> Any:
    """A leaf as something to compare: type, dtype, shape and bytes."""
    if isinstance(value, DTensor):
        return "placed", px.spec_of(value), bits(px.device_get(value))
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().contiguous()
        return str(value.dtype), tuple(value.shape), plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value), value.dtype.str, value.shape, value.tobytes()
    return type(value), value.hex() if isinstance(value, float) else value


def assert_same(got: Any, expected: Any) -> None:
    """Two trees have the same structure and the same bits."""
    assert px.tree.structure(got) == px.tree.structure(expected)
    for (path, a), (_, b) in zip(px.tree.flatten_with_path(got)[0], px.tree.flatten_with_path(expected)[0]):
        assert bits(a) == bits(b), px.tree.path_expr(path)


MESHES: dict[str, tuple[dict[str, int], dict[str, P]]] = {
    "one": ({"data": 1}, {}),
    "data=4": ({"data": 4}, {"w": P("data"), "e": P(None, "data"), "t": P(None, None, "data")}),
    "data=2,model=2": ({"data": 2, "model": 2}, {"w": P("data", "model"), "e": P(("data", "model")), "t": P("model")}),
    "data=2,model=4": ({"data": 2, "model": 4}, {"w": P("model"), "e": P(None, ("data", "model"))}),
    "pipe=3": ({"pipe": 3}, {"w": P(None, "pipe"), "b": P("pipe")}),
}
"""Name -> (axes, specs of `state()`)."""


def state() -> dict[str, torch.Tensor]:
    """Plain values whose dims the meshes divide."""
    return {
        "w": random_bytes(8, 24, dtype=torch.float32, seed=1),
        "e": random_bytes(16, 8, dtype=torch.bfloat16, seed=2),
        "t": random_bytes(4, 3, 8, dtype=torch.complex64, seed=3),
        "b": random_bytes(9, dtype=torch.int8, seed=4),
        "s": torch.tensor(3.5),
    }


def specs_of(name: str) -> dict[str, P]:
    """A whole spec tree of a mesh of `MESHES`."""
    return {leaf: MESHES[name][1].get(leaf, P()) for leaf in state()}
