"""How the ranks of a world agree on a save or a restore: through the world's store, with a deadline.

No collective is used, so that a writer may meet the others' writers while steps run. Whoever waits sees at once that a
rank has failed, and after a time of silence that it is gone; a rank that works on says so (`beat`).
"""

from __future__ import annotations

import collections
import contextlib
import json
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from ptrainx.core import flags
from ptrainx.core import torch_compat as tc
from ptrainx.core.errors import CheckpointDamageError, CheckpointError, CheckpointMismatchError
from ptrainx.mesh.world import current_world

__all__ = ["Meeting", "telling_failure"]

# How many meetings there have been in each world, and the keys that this rank has left in the last ones.
_counts: collections.Counter[int] = collections.Counter()
_left: dict[int, collections.deque[tuple[Any, list[str]]]] = {}

BEAT = 1.0
"""Seconds between two signs of life."""

_TRAVELS = {kind.__name__: kind for kind in (CheckpointDamageError, CheckpointMismatchError)}
"""Errors that are raised on every rank as what they were on the first."""


class Meeting:
    """One meeting of all ranks of the world. Every rank makes its meetings in the same order.

    Args:
        what: for messages, as in `saving step 3`.
        timeout: seconds without a sign of life; by default `PTRAINX_CHECKPOINT_TIMEOUT`.

    Attributes:
        lost: whether the store could not be reached any more.
    """

    def __init__(self, what: str, timeout: float | None = None):
        world = current_world()
        self.what, self.rank, self.size = what, world.rank, world.size
        self.timeout = flags.checkpoint_timeout() if timeout is None else timeout
        self._own: dict[str, bytes] = {}
        self._last_beat, self._beats = time.monotonic(), 0
        self._store: Any = None
        self.lost = False
        if self.size == 1:
            return
        self._store = tc.default_store()
        _counts[world.epoch] += 1
        self._prefix = f"ptrainx/checkpoint/{_counts[world.epoch]}"
        self._keys: list[str] = []
        earlier = _left.setdefault(world.epoch, collections.deque())
        earlier.append((self._store, self._keys))
        for epoch in [epoch for epoch in _left if epoch != world.epoch]:
            del _left[epoch]
        # Whoever has come to this meeting has left the last but two, also where a save goes on beside a restore.
        while len(earlier) > 3:
            self._forget(*earlier.popleft())

    def _forget(self, store: Any, keys: list[str]) -> None:
        with self._reaching():
            for key in keys:
                store.delete_key(key)

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, CheckpointError):
                raise
            self.lost = True
            raise CheckpointError(
                f"{self.what}: rank {self.rank} can't reach the world's store",
                got=str(error).splitlines()[0],
                fix="look for the rank, or the launcher, that keeps the store and has ended",
            ) from error

    def post(self, topic: str, message: Any) -> None:
        """Tells the others something; JSON."""
        data = zlib.compress(json.dumps(message).encode(), 1)
        if self._store is None:
            self._own[topic] = data
            return
        with self._reaching():
            self._set(f"{topic}/{self.rank}", data)

    def _set(self, name: str, data: bytes | str) -> None:
        key = f"{self._prefix}/{name}"
        if key not in self._keys:
            self._keys.append(key)
        self._store.set(key, data)

    def fail(self, error: BaseException) -> None:
        """Tells the others that this rank has failed, so that nobody waits for it."""
        if self._store is not None:
            with contextlib.suppress(CheckpointError), self._reaching():
                self._set("failed", json.dumps([self.rank, type(error).__name__, str(error)]))

    def check_others(self) -> None:
        """Raises if a rank has failed."""
        if self._store is not None:
            with self._reaching():
                self._raise_failure()

    def beat(self) -> None:
        """Tells the others now and then that this rank works on."""
        if self._store is not None and time.monotonic() - self._last_beat > BEAT:
            self._last_beat, self._beats = time.monotonic(), self._beats + 1
            with self._reaching():
                self._set(f"beat/{self.rank}", str(self._beats))

    def gather(self, topic: str, ranks: Sequence[int] | None = None) -> list[Any]:
        """What some ranks (by default all) have posted, in their order.

        Raises:
            CheckpointError: a rank has failed, or gives no sign of life; damage and a mismatch keep their types.
        """
        if self._store is None:
            return [json.loads(zlib.decompress(self._own[topic]))]
        ranks = range(self.size) if ranks is None else ranks
        with self._reaching():
            self._await(topic, ranks)
            return [json.loads(zlib.decompress(self._store.get(f"{self._prefix}/{topic}/{rank}"))) for rank in ranks]

    def _await(self, topic: str, ranks: Sequence[int]) -> None:
        missing = list(ranks)
        last: dict[int, bytes] = {}
        deadline, pause = time.monotonic() + self.timeout, 0.001
        while missing:
            while missing and self._store.check([f"{self._prefix}/{topic}/{missing[0]}"]):
                missing.pop(0)
            if not missing:
                return
            self._raise_failure()
            self.beat()
            if time.monotonic() > deadline:
                late = [r for r in missing if not self._store.check([f"{self._prefix}/{topic}/{r}"])]
                beats = {rank: self._beat_of(rank) for rank in late}
                silent = [rank for rank in late if beats[rank] == last.get(rank, b"")]
                if silent:
                    self._raise_silent(silent)
                last, deadline = beats, time.monotonic() + self.timeout
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)

    def _beat_of(self, rank: int) -> bytes:
        key = f"{self._prefix}/beat/{rank}"
        return self._store.get(key) if self._store.check([key]) else b""

    def _raise_failure(self) -> None:
        if self._store.check([f"{self._prefix}/failed"]):
            rank, kind, text = json.loads(self._store.get(f"{self._prefix}/failed"))
            raise _TRAVELS.get(kind, CheckpointError)(
                f"{self.what}: rank {rank} failed",
                got=f"{kind}: {text}",
                fix=f"mend what rank {rank} reports; this rank has only waited for it",
            )

    def _raise_silent(self, ranks: Sequence[int]) -> None:
        raise CheckpointError(
            f"{self.what}: rank {', '.join(map(str, ranks))} gave no sign of life",
            got=f"waited {self.timeout:g} s",
            expected="every rank of the world makes the same calls",
            fix="look for a rank that stopped or skipped the call; PTRAINX_CHECKPOINT_TIMEOUT sets the seconds",
        )


@contextlib.contextmanager
def telling_failure(meeting: Meeting) -> Iterator[None]:
    """If the body fails on this rank, the others are told."""
    try:
        yield
    except BaseException as error:
        meeting.fail(error)
        raise
