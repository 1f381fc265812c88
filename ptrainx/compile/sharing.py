"""Small facts that the ranks of a mesh tell each other while they compile, through the world's store."""

from __future__ import annotations

import json
import time
from typing import Any

from ptrainx.compile.agreement import Agreement
from ptrainx.core import flags
from ptrainx.core.errors import AgreementError

__all__ = ["share"]


def share(meeting: Agreement, topic: str, value: Any) -> list[Any]:
    """Every rank's value, in the order of ranks; each rank of a meeting has to ask.

    Args:
        meeting: not yet settled.
        topic: one word, once a meeting.
        value: what JSON can say.

    Raises:
        AgreementError: a rank failed before, or did not come in time.
    """
    if meeting.alone:
        return [value]
    store, room = meeting.store, meeting.room
    store.set(f"{meeting.prefix}/{meeting.rank}/{topic}", json.dumps(value))
    # Whoever has come to this meeting has left the last but one.
    store.delete_key(f"{room}/{meeting.number - 2}/{meeting.rank}/{topic}")
    deadline, pause = time.monotonic() + flags.agreement_timeout(), 0.001
    found: dict[int, Any] = {}
    while len(found) < meeting.size:
        for rank in range(meeting.size):
            if rank in found:
                continue
            if store.check([f"{meeting.prefix}/{rank}/{topic}"]):
                found[rank] = json.loads(store.get(f"{meeting.prefix}/{rank}/{topic}"))
            elif store.check([f"{meeting.prefix}/{rank}"]):
                _raise_failure(meeting, rank)
        if len(found) < meeting.size:
            if time.monotonic() > deadline:
                missing = [str(rank) for rank in range(meeting.size) if rank not in found]
                raise AgreementError(
                    f"{meeting.name}: rank {', '.join(missing)} never came to compile it",
                    got=f"waited {flags.agreement_timeout():g} s",
                    fix="look for a rank that stopped, failed, or skipped the call; "
                    "PTRAINX_AGREEMENT_TIMEOUT sets the seconds",
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)
    return [found[rank] for rank in range(meeting.size)]


def _raise_failure(meeting: Agreement, rank: int) -> None:
    record = json.loads(meeting.store.get(f"{meeting.prefix}/{rank}"))
    if "error" in record:
        raise AgreementError(
            f"{meeting.name}: rank {rank} failed before the run",
            got=record["error"],
            fix=f"mend what rank {rank} reports; this rank has only waited for it",
        )
