"""Short forms of the long runs in `crashes.py` and `kills.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint import crashes

ROOT = Path(__file__).resolve().parents[2]


def test_states_after_a_crash_hold_every_committed_step_and_no_partial_one():
    assert crashes.run(120) == 120


@pytest.mark.processes
def test_kills_lose_nothing():
    """20 kills of a process alone; the long run has four."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.kills", "20", "--ranks", "1"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "20 kills, no step lost, none partial\n"
