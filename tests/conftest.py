"""Fixtures that every room's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.collector import rest_collector
from tests.support.pool import Pool


def pytest_collection_finish() -> None:
    """Everything is imported now."""
    rest_collector()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four worker processes for the whole run; see `tests/support/pool.py`."""
    pool = Pool(size=4)
    yield pool
    pool.close()
