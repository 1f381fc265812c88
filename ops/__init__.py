"""What a step is made of: loops, attention, einops, experts, parallel layers, losses, norms, random numbers, rules."""

from ptrainx.ops.accumulate import accumulate_grads
from ptrainx.ops.attention import all_to_all_attention, ring_attention, unzigzag, zigzag
from ptrainx.ops.debug_print import debug_print
from ptrainx.ops.einops import einsum, rearrange, reduce, repeat
from ptrainx.ops.experts import MoEAux, dropless_moe, grouped_matmul, moe, router_jitter
from ptrainx.ops.losses import chunked_cross_entropy, cross_entropy
from ptrainx.ops.norms import layer_norm, rms_norm
from ptrainx.ops.pipeline import pipeline
from ptrainx.ops.scan import scan
from ptrainx.ops.sharding_rules import register_sharding
from ptrainx.ops.tensor_parallel import column_parallel, row_parallel, vocab_parallel_embedding

__all__ = [
    "MoEAux",
    "accumulate_grads",
    "all_to_all_attention",
    "chunked_cross_entropy",
    "column_parallel",
    "cross_entropy",
    "debug_print",
    "dropless_moe",
    "einsum",
    "grouped_matmul",
    "layer_norm",
    "moe",
    "pipeline",
    "rearrange",
    "reduce",
    "register_sharding",
    "repeat",
    "ring_attention",
    "rms_norm",
    "router_jitter",
    "row_parallel",
    "scan",
    "unzigzag",
    "vocab_parallel_embedding",
    "zigzag",
]
