"""Random numbers with explicit keys (exported as `px.random`): the same bits on every mesh, device count and backend.

Data flows keys -> samplers, mask or rounding -> draw (placement) -> operator -> distributions -> stream -> threefry.
"""

from ptrainx.ops.random.keys import fold_in, key, split
from ptrainx.ops.random.mask import dropout
from ptrainx.ops.random.rounding import stochastic_round
from ptrainx.ops.random.samplers import bernoulli, bits, normal, randint, truncated_normal, uniform

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
