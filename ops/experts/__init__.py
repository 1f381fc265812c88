"""Mixtures of experts: each token goes to a few of many functions, which lie on different ranks."""

from ptrainx.ops.experts.capacity import moe
from ptrainx.ops.experts.dropless import dropless_moe
from ptrainx.ops.experts.grouped import grouped_matmul
from ptrainx.ops.experts.routing import MoEAux, router_jitter

__all__ = ["MoEAux", "dropless_moe", "grouped_matmul", "moe", "router_jitter"]
