"""`pcast`: what a value counts as, said by hand."""

from __future__ import annotations

from typing import Any

from ptrainx.core.errors import InputError
from ptrainx.ops.collectives.call import AxisName, map_leaves, open_call, refuse_owed
from ptrainx.ops.collectives.linear import unreduced, varying

__all__ = ["pcast"]


def pcast(x: Any, axis_name: AxisName, *, to: str) -> Any:
    region, axes, source = open_call("pcast", axis_name)
    if to not in ("varying", "unreduced"):
        raise InputError(f"px.pcast: to={to!r}", expected="'varying' or 'unreduced'", source=source)

    def one(leaf: Any) -> Any:
        refuse_owed("pcast", leaf, region, axes)
        leaf = varying(leaf, region, axes, source)
        return leaf if to == "varying" else unreduced(leaf, region, axes, source)

    return map_leaves("pcast", one, x, region)
