"""A registered rule is asked again for arguments that it has not seen."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Shard

import ptrainx as px
from ptrainx import P

LIBRARY = torch.library.Library("ptrainx_rules", "DEF")
LIBRARY.define("total(Tensor x, int[] dims, bool keep, *, float scale) -> Tensor")
LIBRARY.impl("total", lambda x, dims, keep, scale: x.sum(dims, keepdim=keep) * scale, "CompositeExplicitAutograd")
TOTAL = torch.ops.ptrainx_rules.total.default


@px.ops.register_sharding(TOTAL)
def total(x: px.ShapeDtypeStruct, dims: Any, keep: bool, *, scale: float) -> Any:
    """A dim that stays may be split."""
    stay = [d for d in range(len(x.shape)) if d not in dims]
    return [(Shard(d if keep else i), [Shard(d)]) for i, d in enumerate(stay)]


def test_lists_flags_and_numbers_count() -> None:
    mesh = px.make_mesh(data=2, simulate=True)
    x = torch.arange(64.0).reshape(4, 4, 4)
    for dims, keep, scale in (([0], True, 1.0), ([0], False, 1.0), ([1], False, 1.0), ([0, 1], False, 2.0)):
        fn = lambda x, d=dims, k=keep, s=scale: TOTAL(x, d, k, scale=s)  # noqa: E731
        for spec in (P("data"), P(None, "data"), P(None, None, "data")):
            assert torch.equal(px.device_get(px.jit(fn, mesh=mesh, in_specs=spec)(x)), fn(x)), (dims, keep, spec)
