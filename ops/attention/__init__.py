"""Attention over a sequence that is sharded along a mesh axis."""

from ptrainx.ops.attention.all_to_all import all_to_all_attention
from ptrainx.ops.attention.order import unzigzag, zigzag
from ptrainx.ops.attention.ring import ring_attention

__all__ = ["all_to_all_attention", "ring_attention", "unzigzag", "zigzag"]
