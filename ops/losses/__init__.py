"""Cross-entropies over split vocabularies, whose logits are never gathered, or never all there."""

from ptrainx.ops.losses.chunked import chunked_cross_entropy
from ptrainx.ops.losses.cross_entropy import cross_entropy

__all__ = ["chunked_cross_entropy", "cross_entropy"]
