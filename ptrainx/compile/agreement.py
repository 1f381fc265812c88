"""Before a graph first runs, the ranks make sure that they are about to run the same one.

Each rank puts a record into the world's store: the function's name, a hash of its collectives, hashes of the plain
inputs that have to be equal everywhere. Each then reads the others', with a deadline. A rank that failed on its way,
whatever the reason, leaves its error there instead, so that nobody waits for it.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ptrainx.core import flags
from ptrainx.core import torch_compat as tc
from ptrainx.core.errors import AgreementError, InputError
from ptrainx.mesh.mesh import Mesh

__all__ = ["Agreement", "hash_tensor", "is_shared", "meeting_of"]

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
            self.number = _counts[members]
            # The store is new for each world; how many worlds a process has seen is its own affair.
            self.room = f"ptrainx/agree/{'-'.join(map(str, members[1]))}"
            self.prefix = f"{self.room}/{self.number}"
            self.store = tc.default_store()

    def post(self, collectives: Sequence[str], inputs: Mapping[str, str]) -> None:
        """Says what this rank is about to run."""
        self.posted = True
        digest = hashlib.blake2b("\n".join(_comparable(c) for c in collectives).encode(), digest_size=16).hexdigest()
        self.store.set(f"{self.prefix}/{self.rank}/lines", json.dumps(list(collectives)))
        self._set({"name": self.name, "hash": digest, "inputs": dict(inputs)})

    def post_failure(self, error: BaseException) -> None:
        """Says that this rank can't run it."""
        self.posted = True
        self._set({"name": self.name, "error": f"{type(error).__name__}: {error}"})

    def _set(self, record: dict[str, Any]) -> None:
        self.store.set(f"{self.prefix}/{self.rank}", json.dumps(record))
        # Whoever has come to this meeting has left the last but one.
        for kind in ("", "/lines"):
            self.store.delete_key(f"{self.room}/{self.number - 2}/{self.rank}{kind}")

    def settle(self, collectives: Sequence[str], inputs: Mapping[str, str]) -> None:
        """Says what this rank is about to run, waits for every rank and compares.

        Raises:
            AgreementError: a rank failed, never came, runs another function, or has other collectives.
            InputError: plain inputs differ between ranks.
        """
        if self.alone:
            return
        self.post(collectives, inputs)
        records = self._gather()
        mine = records[self.rank]
        for rank, record in records.items():
            if "error" in record:
                raise AgreementError(
                    f"{self.name}: rank {rank} failed before the run",
                    got=record["error"],
                    fix=f"mend what rank {rank} reports; this rank has only waited for it",
                )
        for rank, record in records.items():
            if record["name"] != mine["name"]:
                raise AgreementError(
                    "the ranks run different functions",
                    got=f"rank {self.rank}: {mine['name']}, rank {rank}: {record['name']}",
                    fix="every rank has to call the same jitted functions in the same order",
                )
            if record["hash"] != mine["hash"]:
                raise AgreementError(
                    f"{self.name}: the ranks' graphs differ in their collectives",
                    got=self._first_difference(rank),
                    expected="the same collectives in the same order on every rank",
                    fix="make the step's Python independent of the rank (no `if rank == 0:` inside, same config files)",
                )
            self._compare_inputs(mine["inputs"], record["inputs"], rank)

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

    def _first_difference(self, other: int) -> str:
        keys = [f"{self.prefix}/{rank}/lines" for rank in (self.rank, other)]
        self.store.wait(keys)
        mine, theirs = (json.loads(self.store.get(key)) for key in keys)
        for i in range(max(len(mine), len(theirs))):
            a = mine[i] if i < len(mine) else "nothing more"
            b = theirs[i] if i < len(theirs) else "nothing more"
            if _comparable(a) != _comparable(b):
                return f"collective {i}: rank {self.rank}: {a}\n            rank {other}: {b}"
        return "the same collectives in text"

    def _compare_inputs(self, mine: Mapping[str, str], theirs: Mapping[str, str], rank: int) -> None:
        for path, digest in mine.items():
            if theirs.get(path) != digest:
                raise InputError(
                    f"{self.name}: argument {path} is a plain value that differs between ranks {self.rank} and {rank}",
                    expected="a plain tensor is a global value: the same on every rank",
                    fix="seed every rank alike, or build the value from each rank's rows with px.from_process_local",
                )


def _comparable(line: str) -> str:
    return line.rsplit(" at ", 1)[0]


def hash_tensor(value: torch.Tensor) -> str:
    """A hash of dtype, shape and bytes."""
    digest = hashlib.blake2b(f"{value.dtype}{tuple(value.shape)}".encode(), digest_size=16)
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest.update(flat.numpy().data)
    return digest.hexdigest()
