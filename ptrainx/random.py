"""`px.random`: random numbers from explicit keys; see `ptrainx.ops.random`."""

from ptrainx.ops.random import (
    bernoulli,
    bits,
    dropout,
    fold_in,
    key,
    normal,
    randint,
    split,
    stochastic_round,
    truncated_normal,
    uniform,
)

__all__ = [
    "bernoulli",
    "bits",
    "dropout",
    "fold_in",
    "key",
    "normal",
    "randint",
    "split",
    "stochastic_round",
    "truncated_normal",
    "uniform",
]
