"""JAX-style functional SPMD training over PyTorch.

A step is a pure function, state is a pytree, placement is a partition spec on a named mesh, and the whole step becomes
one graph. Start with `make_mesh`, `jit` and `value_and_grad`; the README has a complete program.
"""

from ptrainx import checkpoint, data, debug, errors, mesh, observe, ops, optim, random, runtime, testing, tree
from ptrainx.compile.timeline import Hardware, Link
from ptrainx.core import remat_policies as checkpoint_policies
from ptrainx.core.avals import ShapeDtypeStruct
from ptrainx.core.tree import TrainState, register_dataclass
from ptrainx.mesh import (
    AbstractMesh,
    Mesh,
    P,
    PartitionSpec,
    block_until_ready,
    device_get,
    device_put,
    from_process_local,
    initialize,
    make_mesh,
    match_rules,
    shutdown,
    spec_of,
    visualize_sharding,
)
from ptrainx.ops import accumulate_grads, scan
from ptrainx.ops.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
)
from ptrainx.optim import DynamicLossScale
from ptrainx.runtime import launch
from ptrainx.transforms import (
    Precision,
    checkpoint_name,
    eval_shape,
    from_module,
    grad,
    hvp,
    jit,
    jvp,
    remat,
    reshard,
    shard_map,
    value_and_grad,
    vjp,
    vmap,
)

__all__ = [
    "AbstractMesh",
    "DynamicLossScale",
    "Hardware",
    "Link",
    "Mesh",
    "P",
    "PartitionSpec",
    "Precision",
    "ShapeDtypeStruct",
    "TrainState",
    "accumulate_grads",
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "block_until_ready",
    "checkpoint",
    "checkpoint_name",
    "checkpoint_policies",
    "data",
    "debug",
    "device_get",
    "device_put",
    "errors",
    "eval_shape",
    "from_module",
    "from_process_local",
    "grad",
    "hvp",
    "initialize",
    "jit",
    "jvp",
    "launch",
    "make_mesh",
    "match_rules",
    "mesh",
    "observe",
    "ops",
    "optim",
    "pcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
    "random",
    "register_dataclass",
    "remat",
    "reshard",
    "runtime",
    "scan",
    "shard_map",
    "shutdown",
    "spec_of",
    "testing",
    "tree",
    "value_and_grad",
    "visualize_sharding",
    "vjp",
    "vmap",
]

__version__ = "0.1.0"
