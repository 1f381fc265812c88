"""Pipelines: layers in stages on the ranks of an axis, microbatches through them by a schedule."""

from ptrainx.ops.pipeline.pipeline import pipeline

__all__ = ["pipeline"]
