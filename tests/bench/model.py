"""What every contender trains: a small GPT, its sizes, its initial values and its one batch, all from numpy.

In: the name of a size. Out: nested dicts of float32 arrays and one batch of tokens, the same for every framework, so
that losses can be compared before times are.

Letters: B batch, T tokens, D model width, V vocabulary, H heads, L layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

__all__ = ["EPSILON", "SIZES", "STEPS_TO_LOSS", "Size", "batch", "initial_params", "optimizer_settings"]

EPSILON = 1e-6  # of the norms
STEPS_TO_LOSS = 23  # the last loss that is compared is that of this step


class Size(NamedTuple):
    """One size of the model, and what it stresses."""

    V: int
    D: int
    L: int
    H: int
    T: int
    B: int
    stresses: str


SIZES = {
    "tiny": Size(V=64, D=32, L=1, H=2, T=8, B=4, stresses="the host: next to no arithmetic"),
    "small": Size(V=1024, D=256, L=4, H=4, T=128, B=8, stresses="arithmetic: matrix products"),
    "wide": Size(V=256, D=512, L=2, H=8, T=32, B=4, stresses="communication: more parameters than activations"),
    "deep": Size(V=256, D=128, L=24, H=4, T=64, B=8, stresses="many operators and many small parameters"),
}


def initial_params(size: str, seed: int = 0) -> dict[str, Any]:
    """Weights normal with standard deviation 0.02, norms one; drawn in the order in which they are written here."""
    s = SIZES[size]
    draw = np.random.RandomState(seed).randn

    def weight(*shape: int) -> np.ndarray:
        return (draw(*shape) * 0.02).astype(np.float32)

    def norm() -> np.ndarray:
        return np.ones(s.D, np.float32)

    def block() -> dict[str, np.ndarray]:
        return {
            "ln1": norm(),
            "qkv": weight(s.D, 3 * s.D),
            "o": weight(s.D, s.D),
            "ln2": norm(),
            "up": weight(s.D, 4 * s.D),
            "down": weight(4 * s.D, s.D),
        }

    return {
        "wte": weight(s.V, s.D),
        "wpe": weight(s.T, s.D),
        "lnf": norm(),
        "blocks": [block() for _ in range(s.L)],
    }


def batch(size: str, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets, each int64 of shape [B, T]: the whole batch, before ranks share it out."""
    s = SIZES[size]
    generator = np.random.RandomState(seed)
    tokens = generator.randint(0, s.V, (s.B, s.T))
    return tokens, generator.randint(0, s.V, (s.B, s.T))


def optimizer_settings() -> dict[str, float]:
    """Adam's settings, by optax's names; there is no weight decay."""
    return {"learning_rate": 1e-3, "b1": 0.9, "b2": 0.99, "eps": 1e-8}
