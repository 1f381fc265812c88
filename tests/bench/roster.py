"""The contenders: names, where each is built, and what has to be there for it to run."""

from __future__ import annotations

import importlib.util
import shutil
from typing import NamedTuple

__all__ = ["DEFAULT", "GROUPS", "REFERENCE", "ROSTER", "Contender", "missing"]


class Contender(NamedTuple):
    """One way to train the model.

    Attributes:
        name: in tables and on the command line.
        about: what it is, in a few words.
        where: `module:function` that builds it: `(size, rank) -> step`.
        runs_in: "ranks" (two processes, a core each) or "jax" (one process, both cores).
        needs: "compiler" (a C++ compiler), or the modules that must be installed.
        same_losses: whether its last loss must be the reference's. Without communication, ranks part after one step.
    """

    name: str
    about: str
    where: str
    runs_in: str = "ranks"
    needs: tuple[str, ...] = ()
    same_losses: bool = True


TORCH, OURS, JAX = "tests.bench.torch_contenders", "tests.bench.ptrainx_contenders", "tests.bench.jax_contenders"
JAX_NEEDS = ("jax", "optax")

# The right answer: trained once, untimed.
REFERENCE = Contender("one device", "plain PyTorch, the whole batch", f"{TORCH}:one_device")

ROSTER = {
    c.name: c
    for c in (
        Contender("compute", "PyTorch, a rank's rows, no communication", f"{TORCH}:compute_alone", same_losses=False),
        Contender(
            "compute-compiled",
            "the same under torch.compile",
            f"{TORCH}:compute_compiled",
            needs=("compiler",),
            same_losses=False,
        ),
        Contender("ddp", "DistributedDataParallel", f"{TORCH}:ddp"),
        Contender("ddp-compiled", "the same under torch.compile", f"{TORCH}:ddp_compiled", needs=("compiler",)),
        Contender("fsdp2", "fully_shard, a unit a layer", f"{TORCH}:fsdp2"),
        Contender("fsdp2-compiled", "the same under torch.compile", f"{TORCH}:fsdp2_compiled", needs=("compiler",)),
        Contender("fsdp2-fast", "fully_shard with a faster reduce-scatter", f"{TORCH}:fsdp2_fast"),
        Contender(
            "fsdp2-fast-compiled", "the same under torch.compile", f"{TORCH}:fsdp2_fast_compiled", needs=("compiler",)
        ),
        Contender("simple-fsdp", "sharded DTensors gathered for use, as SimpleFSDP", f"{TORCH}:simple_fsdp"),
        Contender(
            "simple-fsdp-compiled",
            "the same under torch.compile",
            f"{TORCH}:simple_fsdp_compiled",
            needs=("compiler",),
        ),
        Contender("dtensor", "eager DTensors, parameters replicated", f"{TORCH}:dtensor"),
        Contender("jax", "jit on two host devices, replicated", f"{JAX}:jax_replicated", "jax", JAX_NEEDS),
        Contender("jax-sharded", "the same, parameters sharded", f"{JAX}:jax_sharded", "jax", JAX_NEEDS),
        Contender("ptrainx", "px.jit, parameters replicated", f"{OURS}:ptrainx_step"),
        Contender("ptrainx-zero3", "px.jit, parameters sharded", f"{OURS}:ptrainx_zero3"),
        Contender("ptrainx-inductor", "the same, compiled", f"{OURS}:ptrainx_inductor", needs=("compiler",)),
        Contender(
            "ptrainx-zero3-inductor",
            "parameters sharded, compiled",
            f"{OURS}:ptrainx_zero3_inductor",
            needs=("compiler",),
        ),
        Contender(
            "ptrainx-scan-inductor",
            "layers as a scan, compiled",
            f"{OURS}:ptrainx_scan_inductor",
            needs=("compiler",),
        ),
        Contender(
            "ptrainx-zero3-scan-inductor",
            "parameters sharded, layers as a scan, compiled",
            f"{OURS}:ptrainx_zero3_scan_inductor",
            needs=("compiler",),
        ),
        Contender(
            "ptrainx-inductor-gloo",
            "compiled, collectives through sockets",
            f"{OURS}:ptrainx_inductor_gloo",
            needs=("compiler",),
        ),
        Contender(
            "ptrainx-zero3-inductor-gloo",
            "parameters sharded, compiled, collectives through sockets",
            f"{OURS}:ptrainx_zero3_inductor_gloo",
            needs=("compiler",),
        ),
        Contender("ptrainx-ordered", "reductions in the order of four logical shards", f"{OURS}:ptrainx_ordered"),
        Contender("ptrainx-eager", "px.jit, backend eager", f"{OURS}:ptrainx_eager"),
    )
}

# What goals are told of: the best of several.
GROUPS = {
    "replicated": ("ptrainx-inductor", "ptrainx-scan-inductor"),
    "sharded": ("ptrainx-zero3-inductor", "ptrainx-zero3-scan-inductor"),
    "best DDP": ("ddp", "ddp-compiled"),
    "best FSDP2": ("fsdp2", "fsdp2-compiled"),
    "JAX replicated": ("jax",),
    "JAX sharded": ("jax-sharded",),
}

# The eager backend is for debugging, ordered reductions are for the same bits; they run when asked for.
DEFAULT = tuple(name for name in ROSTER if name not in ("ptrainx-eager", "ptrainx-ordered"))


def missing(contender: Contender) -> str | None:
    """Why a contender can't run here, if something it needs is not there."""
    for need in contender.needs:
        if need == "compiler":
            if not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
                return "there is no C++ compiler, which torch.compile needs on CPU"
        elif importlib.util.find_spec(need) is None:
            return f"{need} is not installed"
    return None
