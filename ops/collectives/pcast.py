"""`pcast`: what a value counts as, said by hand."""

from __future__ import annotations

from typing import Any

from ptrainx.core.errors import InputError
from ptrainx.ops.collectives.call import AxisName, map_leaves, open_call, refuse_owed
from ptrainx.ops.collectives.linear import unreduced, varying

__all__ = ["pcast"]


def pcast(x: Any, axis_name: AxisName, *, to: str) -> Any:
    """The same values, said to be related otherwise along an axis; nothing is sent.

    Type: R -> V with `to="varying"`, R or V -> U (unreduced) with `to="unreduced"`.

    Casts to varying happen by themselves where such a value meets one that varies. By hand, they say by what to
    differentiate: a gradient with respect to a varying value is each rank's own, and no sum over the ranks is taken.

    Args:
        x: a pytree of tensors.
        axis_name: a mesh axis, or a tuple of several.
        to: "varying", or "unreduced": each rank's value is an addend of a sum, which `psum` pays.

    Returns:
        the tree.

    Raises:
        TraceError, MeshError: as `psum`.
        InputError: another `to`.

    Gradient: to varying, the sum of the ranks' cotangents (an all-reduce); to unreduced, the cotangent as it is.
    Bytes: none forwards.

    >>> import torch, ptrainx as px
    >>> from ptrainx import P
    >>> mesh = px.make_mesh(data=2, simulate=True)
    >>> def own(w, x):
    ...     return px.grad(lambda w: (w * x).sum())(px.pcast(w, "data", to="varying"))[None]
    >>> each = px.shard_map(own, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    >>> px.device_get(each(1.0, torch.arange(4.0)))
    tensor([1., 5.])
    """
    region, axes, source = open_call("pcast", axis_name)
    if to not in ("varying", "unreduced"):
        raise InputError(f"px.pcast: to={to!r}", expected="'varying' or 'unreduced'", source=source)

    def one(leaf: Any) -> Any:
        refuse_owed("pcast", leaf, region, axes)
        leaf = varying(leaf, region, axes, source)
        return leaf if to == "varying" else unreduced(leaf, region, axes, source)

    return map_leaves("pcast", one, x, region)
