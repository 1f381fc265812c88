"""Transforms of pure functions: compile, differentiate, place."""

from ptrainx.transforms.eval_shape import eval_shape
from ptrainx.transforms.from_module import from_module
from ptrainx.transforms.grad import grad, value_and_grad
from ptrainx.transforms.jacobian import hvp, jvp, vjp
from ptrainx.transforms.jit import JitFunction, jit
from ptrainx.transforms.precision import Precision
from ptrainx.transforms.remat import checkpoint_name, remat
from ptrainx.transforms.reshard import reshard
from ptrainx.transforms.shard_map import ShardMapFunction, shard_map
from ptrainx.transforms.vmap import vmap

__all__ = [
    "JitFunction",
    "Precision",
    "ShardMapFunction",
    "checkpoint_name",
    "eval_shape",
    "from_module",
    "grad",
    "hvp",
    "jit",
    "jvp",
    "remat",
    "reshard",
    "shard_map",
    "value_and_grad",
    "vjp",
    "vmap",
]
