"""Reading ahead: a function of a position, and what follows a position, become results that wait before they are asked.

It stands between a loader and its source; what is read ahead and never asked for is dropped.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

__all__ = ["Prefetcher"]

_THREAD = "ptrainx-data"

Position = TypeVar("Position")
Result = TypeVar("Result")


class Prefetcher(Generic[Position, Result]):
    """Calls `read(position)`, in a background thread for positions to come.

    Args:
        read: called by one thread at a time.
        following: the position after one, or None at the end.
        depth: how many results may wait; 0 reads in the caller's thread, when asked.

    >>> squares = Prefetcher(lambda i: i * i, lambda i: i + 1 if i < 9 else None, depth=2)
    >>> [squares.take(3), squares.take(4)]
    [9, 16]
    >>> squares.close()
    """

    def __init__(
        self, read: Callable[[Position], Result], following: Callable[[Position], Position | None], depth: int
    ):
        self._read, self._following, self._depth = read, following, depth
        self._executor: ThreadPoolExecutor | None = None
        self._ahead: deque[tuple[Position, Future[Result]]] = deque()

    def take(self, position: Position) -> Result:
        """The result at `position`; raises what `read` raised there. A jump drops what was read ahead."""
        if self._depth == 0:
            return self._read(position)
        if not self._ahead or self._ahead[0][0] != position:
            self._drop()
            self._submit(position)
        _, future = self._ahead.popleft()
        try:
            result = future.result()
        except BaseException:
            self._drop()
            raise
        self._fill(position)
        return result

    def close(self) -> None:
        """Ends the thread, once the read that it is in has returned. A later `take` starts another."""
        self._drop()
        executor, self._executor = self._executor, None
        if executor is not None:
            # A garbage collection may close a forgotten loader from within the thread itself.
            inside = threading.current_thread().name.startswith(_THREAD)
            executor.shutdown(wait=not inside, cancel_futures=True)

    def _fill(self, position: Position) -> None:
        while len(self._ahead) < self._depth:
            after = self._following(self._ahead[-1][0] if self._ahead else position)
            if after is None:
                return
            self._submit(after)

    def _submit(self, position: Position) -> None:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix=_THREAD)
        self._ahead.append((position, self._executor.submit(self._read, position)))

    def _drop(self) -> None:
        for _, future in self._ahead:
            future.cancel()
        self._ahead.clear()
