"""Which rank failed first, and what is said about it.

In: the records that workers left (`ptrainx.runtime.bootstrap.record`) and torch elastic's list of ended processes.
Out: one `RankFailedError`, the cause, where several ranks have failed because one did.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ptrainx.core.errors import WorkerError

__all__ = ["EndedProcess", "RankFailedError", "Record", "first_failure", "read_records"]

# What a collective says once its peer has gone; such an error is an effect, not the cause.
LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket closed",
    "connection refused",
)


class RankFailedError(WorkerError):
    """One worker of a run failed, and the others were stopped.

    Args:
        rank: the global rank that failed first.
        reason: the worker's traceback, or one line where it left none.
        exit_code: the status with which a command line that started the workers should exit.
        fix: what to do, where that is known.

    Example:
        >>> print(RankFailedError(1, "exit status 3", exit_code=3))
        rank 1 failed: exit status 3
    """

    def __init__(self, rank: int, reason: str, *, exit_code: int = 1, fix: str | None = None):
        self.rank, self.reason, self.exit_code = rank, reason, exit_code
        super().__init__(f"rank {rank} failed:{chr(10) if chr(10) in reason else ' '}{reason}", fix=fix)

    def __reduce__(self) -> tuple:
        return _rebuild, (self.rank, self.reason, self.exit_code, self.fix)


def _rebuild(rank: int, reason: str, exit_code: int, fix: str | None) -> RankFailedError:
    return RankFailedError(rank, reason, exit_code=exit_code, fix=fix)


class EndedProcess(Protocol):
    """What is used of torch elastic's `ProcessFailure`."""

    exitcode: int


class Record(NamedTuple):
    """What a worker wrote down about its own failure; `raised` is false for `sys.exit`."""

    rank: int
    time_ns: int
    trace: str
    raised: bool


def read_records(folder: Path) -> dict[int, Record]:
    """The records below a run's log folder, by rank; the latest attempt counts where a run was restarted."""
    records: dict[int, Record] = {}
    for path in folder.rglob("error.json"):
        content: dict[str, Any] = json.loads(path.read_text()).get("ptrainx", {})
        if content:
            found = Record(**content)
            if found.rank not in records or records[found.rank].time_ns < found.time_ns:
                records[found.rank] = found
    return records


def first_failure(ended: Mapping[int, EndedProcess], records: Mapping[int, Record]) -> RankFailedError:
    """Picks the failure that the others followed from.

    Causes come in this order: what a rank raised itself, earliest first; a death without a record (a crash, memory
    run out, `os._exit`); an error that says that a peer was lost; and last the ranks that the launcher has stopped.

    Args:
        ended: the processes that ended badly, by global rank.
        records: what ranks wrote down, by global rank.
    """
    ranks = sorted({*ended, *records})
    return _describe(min(ranks, key=lambda rank: _order(rank, ended, records)), ended, records)


def _order(rank: int, ended: Mapping[int, EndedProcess], records: Mapping[int, Record]) -> tuple[int, int]:
    record = records.get(rank)
    if record is None:
        return (3 if ended[rank].exitcode == -signal.SIGTERM else 1), rank
    last_line = record.trace.rpartition("\n")[2].lower()
    return (2 if any(words in last_line for words in LOST_PEER) else 0), record.time_ns


def _describe(rank: int, ended: Mapping[int, EndedProcess], records: Mapping[int, Record]) -> RankFailedError:
    record = records.get(rank)
    code = ended[rank].exitcode if rank in ended else 1
    if record is not None:
        return RankFailedError(rank, record.trace, exit_code=1 if record.raised or code <= 0 else code)
    if code >= 0:
        return RankFailedError(rank, f"exit status {code}", exit_code=code)
    fix = "see whether the machine ran out of memory (dmesg); use fewer processes or a smaller batch"
    reason = f"killed by signal {-code} ({signal.Signals(-code).name})"
    return RankFailedError(rank, reason, exit_code=128 - code, fix=fix if -code == signal.SIGKILL else None)
