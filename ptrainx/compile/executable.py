"""A lowered program, ready to be called with placed values.

Enters: the leaves of a call. `Executable` takes their local tensors (this rank's, or every simulated rank's), runs the
generated code, and wraps what comes out. Donated leaves give up their memory and can't be used again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ptrainx.compile.agreement import first_difference, graph_lines
from ptrainx.compile.channel import open_channels
from ptrainx.compile.donation import check_donation, donated_names, exclusive, is_donated, refuse, retire
from ptrainx.compile.hosted import one_thread, settled, settled_generator
from ptrainx.compile.lockstep import Lockstep
from ptrainx.compile.lower import generate
from ptrainx.compile.trace import Argument, Program, RankGraph
from ptrainx.core import torch_compat as tc
from ptrainx.core import tree as px_tree
from ptrainx.core.avals import as_tensor
from ptrainx.core.errors import AgreementError, TraceError
from ptrainx.mesh.mesh import Mesh
from ptrainx.mesh.placement import local_block, tensor_spec
from ptrainx.mesh.simulated import local_tensors, wrap_all

__all__ = ["Executable"]

Locals = list[torch.Tensor]


class Executable:
    """Runs one program on one mesh.

    Args:
        program: what was traced.
        graphs: each rank's graph, after the passes; one, for this process's rank, on a real mesh.

    Attributes:
        before_first: called with each rank's local tensors before the first run; None if there is nothing to do.
    """

    def __init__(self, program: Program, graphs: Sequence[RankGraph]):
        assert isinstance(program.mesh, Mesh)
        self.program, self.mesh = program, program.mesh
        first = graphs[0]
        self.out_tree = first.out_tree
        self.captures = [graph.captures for graph in graphs]
        self.versions = [
            (value, version)
            for graph in graphs
            for value, version in zip(graph.captures, graph.capture_versions)
            if version is not None
        ]
        self.donated = [i for i, a in enumerate(program.arguments) if a.donated]
        self.donated_names = donated_names(program)
        donated = set(self.donated)
        self.simulated = self.mesh.simulated
        self.graphs = graphs if self.simulated else ()
        if self.simulated:
            generated = [generate(g, None, donated, program.name) for g in graphs]
            self.sources = [source for _, _, source in generated]
            ordered = program.logical is not None
            steps = [(settled_generator(fn) if ordered else fn, calls) for fn, calls, _ in generated]
            self.lockstep = Lockstep(steps, self.mesh.shape)
        else:
            self.step, _, source = generate(first, open_channels(self.mesh), donated, program.name)
            if program.logical is not None:
                self.step = settled(self.step)
            self.sources = [source]
        self.before_first: Callable[[list[Locals]], None] | None = None
        self.shards = [self._sharder(a) for a in program.arguments]
        self.out_specs = [
            tensor_spec(self.mesh.device_mesh, o.spec, self.mesh, _Like(o.shape, o.dtype))
            if o.shape or o.spec.unreduced
            else None
            for o in first.outputs
        ]

    def __call__(self, leaves: list[Any]) -> Any:
        """The result of a call with these leaves."""
        for captured, version in self.versions:
            if captured._version != version:
                self._refuse_changed(captured)
        with torch.no_grad():
            if self.simulated:
                return self._call_simulated(leaves)
            args = [
                leaf._local_tensor if type(leaf) is DTensor or isinstance(leaf, DTensor) else shard(leaf, 0)
                for leaf, shard in zip(leaves, self.shards)
            ]
            args.extend([_local(c) for c in self.captures[0]])
            args = [a if type(a) is torch.Tensor and a.is_contiguous() else _settled(a) for a in args]
            if self.before_first is not None:
                self._check_first([args])
            if self.donated:
                self._take(leaves, args)
                retire(leaves, self.donated_names)
            outs = self.step(args)
        return px_tree.unflatten(self.out_tree, tc.wrap_locals(outs, self.out_specs))

    def _check_first(self, args: list[Locals]) -> None:
        """Calls `before_first` with each rank's local tensors; once, unless it raises."""
        assert self.before_first is not None
        self.before_first(args)
        self.before_first = None

    def _take(self, leaves: list[Any], args: Locals) -> None:
        """Makes sure that nobody else sees the memory of donated leaves; refuses leaves that share it.

        Counting who sees a leaf's memory settles most of them; only where somebody else does, all leaves are compared.
        """
        doubtful = [self.donated[k] for k in tc.with_shared_storage([args[i] for i in self.donated])]
        shared = any(isinstance(leaves[i], DTensor) for i in doubtful)
        seen: set[int] = set()
        for i in self.donated:
            if type(leaves[i]) is not DTensor and not isinstance(leaves[i], DTensor):
                storage = tc.storage_id(args[i])
                shared = shared or storage in seen or tc.storage_users(args[i]) > 2
                seen.add(storage)
                if i not in doubtful:
                    doubtful.append(i)
        if shared:
            check_donation(leaves, self.donated, self.program)
        for i in doubtful:
            args[i] = exclusive(args[i], leaves[i])

    def _call_simulated(self, leaves: list[Any]) -> Any:
        ranks = self.mesh.ranks
        columns = [
            local_tensors(leaf) if isinstance(leaf, DTensor) else {rank: shard(leaf, rank) for rank in ranks}
            for leaf, shard in zip(leaves, self.shards)
        ]
        args = [[column[rank].contiguous() for column in columns] for rank in ranks]
        for rank, own in zip(ranks, args):
            own.extend(_on_rank(captured, rank) for captured in self.captures[rank])
        if self.before_first is not None:
            self._check_first(args)
        if self.donated:
            check_donation(leaves, self.donated, self.program)
            for i in self.donated:
                seen: set[int] = set()
                for own in args:
                    shared = tc.storage_id(own[i]) in seen
                    own[i] = own[i].clone() if shared else exclusive(own[i], leaves[i])
                    seen.add(tc.storage_id(own[i]))
            retire(leaves, self.donated_names)
        del columns
        try:
            with contextlib.nullcontext() if self.program.logical is None else one_thread():
                outs = self.lockstep.run(args)
        except AgreementError as error:
            self._explain(error)
            raise
        return px_tree.unflatten(
            self.out_tree,
            [
                results[0] if spec is None else wrap_all(list(results), spec)
                for results, spec in zip(zip(*outs), self.out_specs)
            ],
        )

    def _explain(self, error: AgreementError) -> None:
        """Adds the first difference between two ranks' graphs, where they differ in what they send."""
        lines = [graph_lines(graph) for graph in self.graphs]
        sent = [[line.meaning for line in own if line.collective] for own in lines]
        other = next((rank for rank in range(1, len(sent)) if sent[rank] != sent[0]), None)
        if other is not None:
            error.add_note(f"  first:    {first_difference({0: lines[0], other: lines[other]})}")

    def _sharder(self, argument: Argument) -> Callable[[Any, int], torch.Tensor]:
        """What takes a plain global value to a rank's part of it. The part may share memory: nothing writes into it."""
        device, mesh, path = self.mesh.device, self.mesh, argument.path
        if not argument.spec.axes:
            return lambda leaf, rank: as_tensor(leaf, path).detach().to(device)
        blocks = {rank: local_block(argument.spec, mesh, argument.shape, rank) for rank in mesh.ranks}
        if not self.simulated:
            mine = blocks[mesh.rank]
            return lambda leaf, rank: as_tensor(leaf, path).detach()[mine].to(device)
        return lambda leaf, rank: as_tensor(leaf, path).detach()[blocks[rank]].to(device)

    def _refuse_changed(self, captured: torch.Tensor) -> None:
        raise TraceError(
            f"{self.program.name} has captured a tensor that was written in place since it was traced",
            got=f"a tensor of shape {tuple(captured.shape)}",
            fix="pass it as an argument; a captured plain tensor is a constant of the step",
        )


class _Like:
    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype):
        self.shape, self.dtype = torch.Size(shape), dtype


def _on_rank(captured: torch.Tensor, rank: int) -> torch.Tensor:
    if is_donated(captured):
        refuse(captured)
    return local_tensors(captured)[rank].contiguous() if isinstance(captured, DTensor) else captured.detach()


def _local(value: torch.Tensor) -> torch.Tensor:
    if is_donated(value):
        refuse(value)
    return value._local_tensor if isinstance(value, DTensor) else value.detach()


def _settled(value: torch.Tensor) -> torch.Tensor:
    """Contiguous, and there: eager collectives leave tensors that have to be waited for."""
    return (value.wait() if isinstance(value, tc.AsyncCollectiveTensor) else value).contiguous()
