"""What a step is made of: loops, accumulation, attention, einops, random numbers, sharding rules."""

from ptrainx.ops.accumulate import accumulate_grads
from ptrainx.ops.attention import all_to_all_attention, ring_attention, unzigzag, zigzag
from ptrainx.ops.debug_print import debug_print
from ptrainx.ops.einops import einsum, rearrange, reduce, repeat
from ptrainx.ops.scan import scan
from ptrainx.ops.sharding_rules import register_sharding

__all__ = [
    "accumulate_grads",
    "all_to_all_attention",
    "debug_print",
    "einsum",
    "rearrange",
    "reduce",
    "register_sharding",
    "repeat",
    "ring_attention",
    "scan",
    "unzigzag",
    "zigzag",
]
