"""Before a graph first runs, the ranks make sure that they are about to run the same one.

Each rank puts a record into the world's store: the function's name, a hash of its collectives, hashes of the plain
inputs that have to be equal everywhere. Each then reads the others', with a deadline. A rank that failed on its way,
whatever the reason, leaves its error there instead, so that nobody waits for it. Only where hashes differ do the ranks
exchange their graphs' lines, and each is shown the first difference. Ranks may differ in what depends on their place
(which rows of a replicated value are mine), so it is collectives that have to agree.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ptrainx.compile.graph import axis_group, is_collective, schema_name, walk
from ptrainx.compile.text import node_lines
from ptrainx.compile.trace import RankGraph
from ptrainx.core import flags
from ptrainx.core import torch_compat as tc
from ptrainx.core.avals import describe
from ptrainx.core.errors import AgreementError, InputError
from ptrainx.mesh.axes import split_axes
from ptrainx.mesh.mesh import Mesh

__all__ = ["Agreement", "GraphLine", "first_difference", "graph_lines", "hash_tensor", "is_shared", "meeting_of"]


class GraphLine(NamedTuple):
    """A line of a rank's graph.

    Attributes:
        meaning: what has to be alike on every rank: operator and types, of a collective its axis and arguments too.
        text: the line of `as_text`, with its source, layer and reason.
        collective: whether it sends anything.
    """

    meaning: str
    text: str
    collective: bool


def graph_lines(graph: RankGraph) -> list[GraphLine]:
    """The lines of a rank's graph, in order, those of a loop in its place."""
    times = dict(walk(graph.module.graph))
    return [
        GraphLine(_meaning(node, times[node], graph), text, is_collective(node)) for node, text in node_lines(graph)
    ]


def collectives_of(graph: RankGraph, calls: bool = True) -> list[tuple[str, str, str]]:
    """(axis, name, meaning) of each collective, in order.

    All ranks have to agree on axes and names; those that meet in a collective on its meaning too. The others may send
    another number of rows, where an axis cuts a dim unevenly, or run other stages of a pipeline in their calls.
    """
    nodes = [(node, times) for node, times in walk(graph.module.graph, 1, calls) if is_collective(node)]
    return [(graph.axis_of[axis_group(node)], _name(node), _meaning(node, times, graph)) for node, times in nodes]


def _meaning(node: Node, times: int, graph: RankGraph) -> str:
    name = _name(node)
    if not is_collective(node):
        value = node.meta.get("val")
        return f"{name} {describe(value)}" if isinstance(value, torch.Tensor) else name
    operand, *middle, _ = node.args
    # What each rank sends and takes in an uneven all-to-all may differ; whom a permutation sends to may not.
    plain = [m for m in middle if isinstance(m, (str, int)) or name == "ppermute"]
    axis, value = graph.axis_of[axis_group(node)], operand.meta["val"]  # type: ignore[union-attr]
    if name == "all_to_all_single":
        value = value.new_empty((0, *value.shape[1:]))  # how many rows each rank sends may differ too
    return f"{name} over {axis} of {describe(value)} {plain} {times} times"


def _name(node: Node) -> str:
    return schema_name(node).split("::")[-1] or str(node.target)


def _hash(lines: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def first_difference(sides: Mapping[int, Sequence[GraphLine]]) -> str:
    """The first collective in which two ranks differ, and what leads to it, with each side's line and source.

    Args:
        sides: the lines of two ranks.
    """
    (a, mine), (b, theirs) = sides.items()
    ours, others = ([line for line in lines if line.collective] for lines in (mine, theirs))
    i = _common([line.meaning for line in ours], [line.meaning for line in others])
    shown = [f"collective {i}: {_side(a, ours, i)}", f"            {_side(b, others, i)}"]
    if i:
        shown.append(f"the last that agrees: {ours[i - 1].text}")
    start, end = _between(mine, i), _between(theirs, i)
    first = _common([line.meaning for line in start], [line.meaning for line in end])
    here, there = ([*lines[first : first + 1], None][0] for lines in (start, end))
    if any(line is not None and not line.collective for line in (here, there)):
        shown.append(f"the graphs part at: {_side(a, start, first)}")
        shown.append(f"                    {_side(b, end, first)}")
    return "\n            ".join(shown)


def _common(mine: Sequence[str], theirs: Sequence[str]) -> int:
    """The length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))


def _side(rank: int, lines: Sequence[GraphLine], i: int) -> str:
    return f"rank {rank}: {lines[i].text if i < len(lines) else 'nothing more'}"


def _between(lines: Sequence[GraphLine], i: int) -> list[GraphLine]:
    """What follows collective i - 1, up to collective i."""
    places = [p for p, line in enumerate(lines) if line.collective]
    start = places[i - 1] + 1 if i else 0
    return list(lines[start : places[i] + 1 if i < len(places) else len(lines)])


# How many meetings there have been, by world and members: the ranks of a mesh meet in one order.
_counts: collections.Counter[tuple] = collections.Counter()


def is_shared(mesh: Any) -> bool:
    """Whether a mesh is spread over several processes."""
    return isinstance(mesh, Mesh) and not mesh.simulated and mesh.size > 1


@contextlib.contextmanager
def meeting_of(mesh: Any, name: str) -> Iterator[Agreement]:
    """A meeting of a mesh's ranks about a function; if its body fails on this rank, the others are told."""
    meeting = Agreement(mesh, name)
    try:
        yield meeting
    except BaseException as error:
        if not meeting.posted:
            meeting.post_failure(error)
        raise


class Agreement:
    """One meeting of the ranks. Every rank makes its meetings in the same order.

    Args:
        mesh: any mesh; one that is not spread over processes agrees with itself.
        name: of the function.
    """

    def __init__(self, mesh: Any, name: str):
        self.name, self.posted = name, not is_shared(mesh)
        self.rank, self.size, self.alone = mesh.ranks[0], mesh.size, self.posted
        if not self.alone:
            members = (mesh.epoch, tuple(mesh.device_mesh.mesh.flatten().tolist()))
            _counts[members] += 1
            self.axis_names = mesh.axis_names
            self.coords = [mesh.rank_coords(rank) for rank in range(mesh.size)]
            self.number = _counts[members]
            # The store is new for each world; how many worlds a process has seen is its own affair.
            self.room = f"ptrainx/agree/{'-'.join(map(str, members[1]))}"
            self.prefix = f"{self.room}/{self.number}"
            self.store = tc.default_store()

    def post(self, graph: RankGraph | None, inputs: Mapping[str, str]) -> None:
        """Says what this rank is about to run."""
        self.posted = True
        collectives = [] if graph is None else collectives_of(graph)
        axes = {axis: _hash([meaning for own, _, meaning in collectives if own == axis]) for axis, _, _ in collectives}
        common = [] if graph is None else collectives_of(graph, calls=False)
        digest = _hash([f"{axis} {name}" for axis, name, _ in common])
        self._set({"name": self.name, "hash": digest, "axes": axes, "inputs": dict(inputs)})

    def post_failure(self, error: BaseException) -> None:
        """Says that this rank can't run it."""
        self.posted = True
        self._set({"name": self.name, "error": f"{type(error).__name__}: {error}"})

    def _set(self, record: dict[str, Any]) -> None:
        self.store.set(f"{self.prefix}/{self.rank}", json.dumps(record))
        # Whoever has come to this meeting has left the last but one.
        for kind in ("", "/lines"):
            self.store.delete_key(f"{self.room}/{self.number - 2}/{self.rank}{kind}")

    def settle(self, graph: RankGraph | None, inputs: Mapping[str, str]) -> None:
        """Says what this rank is about to run, waits for every rank and compares.

        Args:
            graph: this rank's; None if nothing is compiled.
            inputs: path -> hash of what has to be equal everywhere.

        Raises:
            AgreementError: a rank failed, never came, runs another function, or has other collectives.
            InputError: plain inputs differ between ranks.
        """
        if self.alone:
            return
        self.post(graph, inputs)
        records = self._gather()
        mine = records[self.rank]
        for rank, record in records.items():
            if "error" in record:
                raise AgreementError(
                    f"{self.name}: rank {rank} failed before the run",
                    got=record["error"],
                    fix=f"mend what rank {rank} reports; this rank has only waited for it",
                )
        if graph is not None and any(self._differ(a, b, records) for a in records for b in records if a < b):
            self._post_lines(graph)
        for rank, record in records.items():
            if record["name"] != mine["name"]:
                raise AgreementError(
                    "the ranks run different functions",
                    got=f"rank {self.rank}: {mine['name']}, rank {rank}: {record['name']}",
                    fix="every rank has to call the same jitted functions in the same order",
                )
            if self._differ(self.rank, rank, records):
                raise AgreementError(
                    f"{self.name}: the ranks' graphs differ in their collectives",
                    got=self._first_difference(rank),
                    expected="the same collectives in the same order on every rank",
                    fix="make the step's Python independent of the rank (no `if rank == 0:` inside, same config files)",
                )
            self._compare_inputs(mine["inputs"], record["inputs"], rank)

    def _differ(self, a: int, b: int, records: Mapping[int, Any]) -> bool:
        """Whether two ranks have other collectives, or other ones along an axis on which they meet."""
        if records[a].get("hash") != records[b].get("hash"):
            return True
        mine, theirs = records[a].get("axes", {}), records[b].get("axes", {})
        return any(mine[axis] != theirs[axis] for axis in mine if self._meet(a, b, axis))

    def _meet(self, a: int, b: int, axis: str) -> bool:
        apart = split_axes(axis)
        return all(x == y for name, x, y in zip(self.axis_names, self.coords[a], self.coords[b]) if name not in apart)

    def _gather(self) -> dict[int, dict[str, Any]]:
        deadline = time.monotonic() + flags.agreement_timeout()
        missing = list(range(self.size))
        records: dict[int, dict[str, Any]] = {}
        pause = 0.001
        while missing:
            for rank in list(missing):
                if self.store.check([f"{self.prefix}/{rank}"]):
                    records[rank] = json.loads(self.store.get(f"{self.prefix}/{rank}"))
                    missing.remove(rank)
            if missing:
                if time.monotonic() > deadline:
                    raise AgreementError(
                        f"{self.name}: rank {', '.join(map(str, missing))} never came to run it",
                        got=f"waited {flags.agreement_timeout():g} s",
                        fix="look for a rank that stopped, failed, or skipped the call; "
                        "PTRAINX_AGREEMENT_TIMEOUT sets the seconds",
                    )
                time.sleep(pause)
                pause = min(pause * 1.5, 0.05)
        return dict(sorted(records.items()))

    def _post_lines(self, graph: RankGraph) -> None:
        lines = [tuple(line) for line in graph_lines(graph)]
        self.store.set(f"{self.prefix}/{self.rank}/lines", zlib.compress(json.dumps(lines).encode()))

    def _first_difference(self, other: int) -> str:
        keys = {rank: f"{self.prefix}/{rank}/lines" for rank in (self.rank, other)}
        self.store.wait(list(keys.values()))
        return first_difference(
            {
                rank: [GraphLine(*line) for line in json.loads(zlib.decompress(self.store.get(key)))]
                for rank, key in sorted(keys.items())
            }
        )

    def _compare_inputs(self, mine: Mapping[str, str], theirs: Mapping[str, str], rank: int) -> None:
        for path, digest in mine.items():
            if theirs.get(path) != digest:
                raise InputError(
                    f"{self.name}: argument {path} is a plain value that differs between ranks {self.rank} and {rank}",
                    expected="a plain tensor is a global value: the same on every rank",
                    fix="seed every rank alike, or build the value from each rank's rows with px.from_process_local",
                )


def hash_tensor(value: torch.Tensor) -> str:
    """A hash of dtype, shape and bytes."""
    digest = hashlib.blake2b(f"{value.dtype}{tuple(value.shape)}".encode(), digest_size=16)
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest.update(flat.numpy().data)
    return digest.hexdigest()
