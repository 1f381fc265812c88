"""JAX-style functional SPMD training over PyTorch."""

from ptrainx.core import errors, tree
from ptrainx.core.tree import TrainState, register_dataclass

__all__ = ["TrainState", "errors", "register_dataclass", "tree"]
