"""Reading ahead: bounded, invisible in the state, errors in their turn, no thread left behind."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref

import pytest

from ptrainx.data import Loader
from ptrainx.data.prefetch import Prefetcher
from ptrainx.mesh import device_get
from tests.data.cases import ROWS, Counting, two


def test_reading_ahead_is_bounded_and_state_tells_what_was_delivered():
    source = Counting()
    loader = Loader(source, 4, mesh=two(), prefetch=2, shuffle=False)
    source.threads.clear()
    iterator = iter(loader)
    next(iterator)
    assert loader.state_dict()["batch"] == 1
    assert not source.threads & {threading.main_thread().name}
    iterator.close()  # waits for the read in flight
    assert max(source.reads) < 4 * (1 + 2)


def data_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("ptrainx-data")]


@pytest.mark.parametrize("how", ["end", "break", "raise", "close", "forget"])
def test_the_thread_ends_with_the_loop(how):
    assert not data_threads()
    loader = Loader(ROWS, 4, mesh=two(), prefetch=3)
    if how == "end":
        list(loader)
    elif how == "break":
        for _ in loader:
            assert data_threads()
            break
    elif how == "raise":
        with contextlib.suppress(ZeroDivisionError):
            for _ in loader:
                raise ZeroDivisionError
    else:
        iterator = iter(loader)
        next(iterator)
        if how == "close":
            iterator.close()
        else:
            gone = weakref.ref(loader)
            del loader, iterator
            gc.collect()
            assert gone() is None
    assert not data_threads()


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_an_error_of_the_source_is_raised_in_its_turn_and_the_batch_can_be_tried_again(prefetch):
    source = Counting(fail_at=9)
    loader = Loader(source, 4, mesh=two(), shuffle=False, prefetch=prefetch)
    delivered = []
    with pytest.raises(OSError, match="the disk is gone") as error:
        delivered.extend(device_get(batch)[:, 0].tolist() for batch in loader)
    assert delivered == [[0, 100, 200, 300], [400, 500, 600, 700]]
    assert error.value.__notes__ == ["while a Loader read samples 8, 9 for batch 2 of epoch 0, rows 0 to 1"]
    assert loader.state_dict()["batch"] == 2
    source.fail_at = None
    assert device_get(next(iter(loader)))[:, 0].tolist() == [800, 900, 1000, 1100]
    del error
    gc.collect()
    assert not data_threads()


def test_prefetcher_reads_in_order_up_to_its_depth_and_forgets_after_a_jump():
    read, gate = [], threading.Semaphore(0)

    def one(i):
        gate.acquire()
        read.append(i)
        return i * i

    prefetcher = Prefetcher(one, lambda i: i + 1 if i < 5 else None, depth=2)
    gate.release(1)
    assert prefetcher.take(0) == 0
    gate.release(1)
    assert prefetcher.take(1) == 1
    gate.release(100)
    assert prefetcher.take(4) == 16
    assert prefetcher.take(5) == 25
    prefetcher.close()
    assert [i for i in read if i in (0, 1, 4, 5)] == [0, 1, 4, 5]
    assert prefetcher.take(3) == 9
    prefetcher.close()
