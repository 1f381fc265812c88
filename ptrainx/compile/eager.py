"""`backend="eager"`: the same program operator by operator on DTensors, for debugging.

Nothing is traced: breakpoints stop, prints print, values can be read. Placements and results are those of the graph.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ptrainx.compile.donation import check_donation, retire
from ptrainx.compile.guards import EagerValues, guard_methods
from ptrainx.compile.trace import Program, place_outputs
from ptrainx.core import torch_compat as tc
from ptrainx.core import tree as px_tree
from ptrainx.core.trace_context import TraceContext
from ptrainx.mesh.mesh import Mesh
from ptrainx.mesh.simulated import SimulatedDTensor, on_all_ranks
from ptrainx.mesh.transfer import device_put
from ptrainx.ops.sharding_rules import install_sharding_rules

__all__ = ["EagerProgram"]


class EagerProgram:
    """Runs a program without a graph; called with the leaves of its arguments."""

    def __init__(self, program: Program):
        install_sharding_rules()
        assert isinstance(program.mesh, Mesh)
        self.program, self.mesh = program, program.mesh
        self.donated = [i for i, a in enumerate(program.arguments) if a.donated]

    def __call__(self, leaves: list[Any]) -> Any:
        check_donation(leaves, self.donated, self.program)
        view: Any = self.mesh.device_mesh
        trace = TraceContext(self.mesh, view, self.mesh.rank, self.program.name)
        ranks: Any = on_all_ranks(view) if self.mesh.simulated else contextlib.nullcontext()
        placed = [self._place(leaf, a.spec) for leaf, a in zip(leaves, self.program.arguments)]
        before = tc.set_implicit_replication(True)
        undo = guard_methods(trace, refuse=False)
        try:
            with ranks, trace.active(), torch.no_grad():
                values = EagerValues(trace)
                trace.as_global = values.as_global
                with values:
                    result = self.program.call([values.replicated(leaf).detach() for leaf in placed])
                outs, treedef, _ = place_outputs(result, self.program, trace, values.replicated)
                finished = [self._finish(out, placed) for out in outs]
        finally:
            undo()
            tc.set_implicit_replication(before)
        retire(leaves, self.donated, self.program)
        return px_tree.unflatten(treedef, finished)

    def _place(self, leaf: Any, spec: Any) -> torch.Tensor:
        return leaf if isinstance(leaf, DTensor) else device_put(leaf, spec, self.mesh)

    def _finish(self, out: DTensor, placed: list[torch.Tensor]) -> torch.Tensor:
        out = out.detach().clone(memory_format=torch.contiguous_format)
        if out.ndim:
            if self.mesh.simulated:
                out.__class__ = SimulatedDTensor
            return out
        local = out._local_tensor
        if isinstance(local, tc.AsyncCollectiveTensor):
            local = local.wait()
        return local.reconcile() if isinstance(local, tc.LocalTensor) else local
