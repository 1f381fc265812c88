"""A graph as one operator of another graph: what a pipeline's rank runs, and the pieces of its stages."""

from ptrainx.ops.call.operator import CALL, call_results, trace_call

__all__ = ["CALL", "call_results", "trace_call"]
