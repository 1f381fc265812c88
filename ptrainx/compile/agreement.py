"""Before a graph first runs, the ranks make sure that they are about to run the same one.

Each rank puts a record into the world's store: the function's name, a hash of its collectives, hashes of the plain
inputs that have to be equal everywhere. Each then reads the others', with a deadline. A rank that failed while tracing
leaves its error there instead, so that nobody waits for it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ptrainx.core import flags
from ptrainx.core import torch_compat as tc
from ptrainx.core.errors import AgreementError, InputError

__all__ = ["Agreement", "hash_tensor"]

_counts: dict[int, int] = {}


class Agreement:
    """One meeting of the ranks. Every rank makes its meetings in the same order.

    Args:
        mesh: a real mesh of more than one process.
        name: of the function.
    """

    def __init__(self, mesh: Any, name: str):
        self.rank, self.size, self.name = mesh.rank, mesh.size, name
        number = _counts[mesh.epoch] = _counts.get(mesh.epoch, 0) + 1
        # The store is new for each world; how many worlds a process has seen is its own affair.
        self.prefix = f"ptrainx/agree/{number}"
        self.store = tc.default_store()

    def post(self, collectives: Sequence[str], inputs: Mapping[str, str]) -> None:
        """Says what this rank is about to run."""
        digest = hashlib.blake2b("\n".join(_comparable(c) for c in collectives).encode(), digest_size=16).hexdigest()
        self._set({"name": self.name, "hash": digest, "inputs": dict(inputs)})
        self.store.set(f"{self.prefix}/{self.rank}/lines", json.dumps(list(collectives)))

    def post_failure(self, error: BaseException) -> None:
        """Says that this rank can't run it."""
        self._set({"name": self.name, "error": f"{type(error).__name__}: {error}"})

    def _set(self, record: dict[str, Any]) -> None:
        self.store.set(f"{self.prefix}/{self.rank}", json.dumps(record))

    def settle(self) -> None:
        """Waits for every rank and compares.

        Raises:
            AgreementError: a rank failed, never came, runs another function, or has other collectives.
            InputError: plain inputs differ between ranks.
        """
        records = self._gather()
        mine = records[self.rank]
        for rank, record in records.items():
            if "error" in record:
                raise AgreementError(f"{self.name}: rank {rank} failed before the first run\n{record['error']}")
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
    digest.update(memoryview(flat.numpy()))
    return digest.hexdigest()
