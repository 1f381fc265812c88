"""The loop as one operator of a step's graph: its body is a graph of its own, traced once."""

from ptrainx.ops.loop.operator import LOOP, LoopForm

__all__ = ["LOOP", "LoopForm"]
