"""What overlap is worth by the cost model: `python -m tests.bench.overlap` prints a table.

A step of the bench's GPT, lowered for 8, 64 and 1,024 ranks with the graph's own order of issues and waits, priced on a
machine in which computing and sending balance: on two cores, as the other benchmarks have them, sending steals compute.
Each rank has eight rows. Nothing runs.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import ptrainx as px
from ptrainx import P
from ptrainx.compile.timeline import Hardware, Link, Timeline
from tests.bench.model import SIZES, optimizer_settings
from tests.bench.torch_model import loss_fn, torch_params

__all__ = ["HARDWARE", "price"]

RANKS = (8, 64, 1024)
ROWS = 8
HARDWARE = Hardware(flops_per_s=100e12, bytes_per_s=2e12, launch_s=3e-6, link=Link(bytes_per_s=100e9, latency_s=0.5e-6))
"""A device of 100 TFLOP/s with 2 TB/s of memory, on a ring of 100 GB/s and half a microsecond a hop."""


def price(size: str, ranks: int, sharded: bool) -> Timeline:
    """The time of a step on `ranks` ranks: data-parallel, or with every weight sharded that the ranks divide."""
    mesh = px.AbstractMesh(data=ranks)
    s = SIZES[size]
    optimizer = px.optim.adamw(**optimizer_settings(), weight_decay=0.0)
    params = torch_params(size)
    state = {"params": params, "opt": optimizer.init(params)}
    specs = px.tree.map(lambda leaf: _place(leaf, ranks) if sharded else P(), state)
    tokens = px.ShapeDtypeStruct((ROWS * ranks, s.T), torch.int64)

    @px.jit(mesh=mesh, in_specs=(specs, P("data"), P("data")), out_specs=(specs, P()), donate_argnums=0)
    def step(state: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        def whole(p: Any) -> torch.Tensor:
            return loss_fn(px.reshard(p, P()) if sharded else p, tokens, targets, s.H)

        loss, grads = px.value_and_grad(whole)(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": px.optim.apply_updates(state["params"], updates), "opt": opt}, loss

    return step.lower(state, tokens, tokens).timeline(HARDWARE)


def _place(leaf: torch.Tensor, ranks: int) -> P:
    """Split on the first dim that the ranks divide."""
    for dim, n in enumerate(leaf.shape):
        if n % ranks == 0 and n > 0:
            return P(*[None] * dim, "data")
    return P()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=["small", "deep"], choices=sorted(SIZES))
    head = ("size", "ranks", "weights", "compute ms", "sending ms", "step ms", "no overlap", "hidden")
    print("{:>6} {:>6} {:>10} {:>11} {:>11} {:>9} {:>11} {:>7}".format(*head))
    for size in parser.parse_args().sizes:
        for ranks in RANKS:
            for sharded in (False, True):
                t = price(size, ranks, sharded)
                hidden = 1 - t.exposed / t.communication
                print(
                    f"{size:>6} {ranks:>6} {'sharded' if sharded else 'replicated':>10} {t.compute * 1e3:>11.3f} "
                    f"{t.communication * 1e3:>11.3f} {t.total * 1e3:>9.3f} {t.unoverlapped * 1e3:>11.3f} {hidden:>7.0%}"
                )


if __name__ == "__main__":
    main()
