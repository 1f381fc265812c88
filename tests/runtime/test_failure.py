"""Which rank's failure is shown, where several follow from one."""

from __future__ import annotations

import pickle
import signal
from dataclasses import dataclass

import pytest

from ptrainx.core.errors import PtrainxError, WorkerError
from ptrainx.runtime.failure import RankFailedError, Record, first_failure

PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:13510"


@dataclass
class Ended:
    exitcode: int


def raised(rank: int, time_ns: int, last: str) -> Record:
    return Record(rank, time_ns, f"Traceback (most recent call last):\n{last}", True)


CASES = {
    "the earlier of two": ({0: 1, 1: 1}, [raised(0, 20, "ValueError: b"), raised(1, 10, "ValueError: a")], 1, 1),
    "a cause before its earlier echo": ({0: 1, 1: 1}, [raised(0, 10, PEER), raised(1, 20, "ValueError: a")], 1, 1),
    "a crash before the echo it made": ({0: 1, 1: -signal.SIGSEGV}, [raised(0, 10, PEER)], 1, 128 + signal.SIGSEGV),
    "os._exit before a stopped rank": ({0: -signal.SIGTERM, 1: 7}, [], 1, 7),
    "memory run out": ({0: -signal.SIGTERM, 1: -signal.SIGKILL}, [], 1, 128 + signal.SIGKILL),
    "an echo alone": ({0: 1, 1: -signal.SIGTERM}, [raised(0, 10, PEER)], 0, 1),
    "sys.exit with a status": ({0: -signal.SIGTERM, 1: 3}, [Record(1, 10, "exit status 3", False)], 1, 3),
    "a record whose process the launcher stopped later": ({1: -signal.SIGTERM}, [raised(1, 10, "KeyError: 1")], 1, 1),
    "a signal to the run itself": ({0: -signal.SIGTERM, 1: -signal.SIGTERM}, [], 0, 128 + signal.SIGTERM),
}


@pytest.mark.parametrize(("ended", "records", "rank", "exit_code"), CASES.values(), ids=CASES.keys())
def test_the_cause_is_picked(ended: dict[int, int], records: list[Record], rank: int, exit_code: int) -> None:
    processes = {number: Ended(code) for number, code in ended.items()}
    error = first_failure(processes, {record.rank: record for record in records})
    assert (error.rank, error.exit_code) == (rank, exit_code)
    assert str(error).startswith(f"rank {rank} failed:")


def test_a_killed_rank_is_told_with_what_to_do() -> None:
    error = first_failure({1: Ended(-signal.SIGKILL)}, {})
    assert str(error).splitlines()[0] == "rank 1 failed: killed by signal 9 (SIGKILL)"
    assert "ran out of memory" in str(error)


def test_the_error_is_typed_and_travels_between_processes() -> None:
    error = RankFailedError(3, "Traceback:\nValueError: x", exit_code=1, fix="do this")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, WorkerError)
    assert isinstance(copy, PtrainxError)
    assert (str(copy), copy.rank, copy.exit_code) == (str(error), 3, 1)
