"""`backend="eager"`: the same program operator by operator on DTensors, for debugging.

Nothing is traced: breakpoints stop, prints print, values can be read. Placements and results are those of the graph,
and so is what is refused: writes into arguments, randomness without a key.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ptrainx.compile.donation import check_donation, donated_names, retire
from ptrainx.compile.guards import EagerValues
from ptrainx.compile.rules import LocalRules, guard_methods, storages
from ptrainx.compile.trace import Program, place_outputs, quiet, tracing_alone
from ptrainx.core import torch_compat as tc
from ptrainx.core import tree as px_tree
from ptrainx.core.trace_context import TraceContext
from ptrainx.mesh.mesh import Mesh
from ptrainx.mesh.partition_spec import PartitionSpec
from ptrainx.mesh.placement import tensor_spec
from ptrainx.mesh.simulated import on_all_ranks, wrap_all
from ptrainx.mesh.transfer import device_put
from ptrainx.ops.sharding_rules import install_sharding_rules

__all__ = ["EagerProgram"]


class EagerProgram:
    """Runs a program without a graph; `run` takes the leaves of its arguments."""

    def __init__(self, program: Program):
        install_sharding_rules()
        assert isinstance(program.mesh, Mesh)
        self.program, self.mesh = program, program.mesh
        self.donated = [i for i, a in enumerate(program.arguments) if a.donated]

    def run(self, leaves: list[Any]) -> Any:
        check_donation(leaves, self.donated, self.program)
        placed = [self._place(leaf, a.spec) for leaf, a in zip(leaves, self.program.arguments)]
        view: Any = self.mesh.device_mesh
        trace = TraceContext(self.mesh, view, self.mesh.rank, self.program.name)
        names = {s: f"argument {a.path}" for t, a in zip(placed, self.program.arguments) for s in storages(t)}
        ranks: Any = on_all_ranks(view) if self.mesh.simulated else contextlib.nullcontext()
        values, rules = EagerValues(trace), LocalRules(trace, names.get, readable=True)
        trace.as_global = values.as_global
        with tracing_alone, quiet(), _eager_dtensor(trace), ranks, trace.active(), torch.no_grad():
            arguments = [values.argument(leaf, a) for leaf, a in zip(placed, self.program.arguments)]
            with values, rules:
                result = self.program.call(arguments)
            with rules:
                outs, treedef, outputs = place_outputs(result, self.program, trace, values.replicated)
                finished = [self._finish(out, o.spec) for out, o in zip(outs, outputs)]
        retire(leaves, donated_names(self.program))
        return px_tree.unflatten(treedef, finished)

    def _place(self, leaf: Any, spec: Any) -> torch.Tensor:
        return leaf if isinstance(leaf, DTensor) else device_put(leaf, spec, self.mesh)

    def _finish(self, out: DTensor, spec: PartitionSpec) -> torch.Tensor:
        local: Any = out._local_tensor
        if isinstance(local, tc.AsyncCollectiveTensor):
            local = local.wait()
        parts = local._local_tensors if isinstance(local, tc.LocalTensor) else None
        if not out.ndim and not spec.unreduced:
            return (parts[0] if parts else local).clone()
        whole = tensor_spec(self.mesh.device_mesh, spec, self.mesh, out)
        if not self.mesh.simulated:
            return tc.wrap_local(local.clone(memory_format=torch.contiguous_format), whole)
        every = [parts[rank] if parts else local for rank in self.mesh.ranks]
        return wrap_all([part.clone(memory_format=torch.contiguous_format) for part in every], whole)


@contextlib.contextmanager
def _eager_dtensor(trace: TraceContext) -> Iterator[None]:
    """DTensor takes plain tensors for replicated ones, and its methods work under our modes."""
    before = tc.set_implicit_replication(True)
    undo = guard_methods(trace, refuse=False)
    try:
        yield
    finally:
        undo()
        tc.set_implicit_replication(before)
