"""Einops patterns on global values: what a pattern keeps whole stays where it is, and nothing is sent."""

from ptrainx.ops.einops.einsum import einsum
from ptrainx.ops.einops.rearrange import rearrange, reduce, repeat

__all__ = ["einsum", "rearrange", "reduce", "repeat"]
