"""`import ptrainx` is cheap and does nothing but define names."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROBE = """
import json, sys, threading
import torch, torch.distributed.tensor
before = set(sys.modules)
import ptrainx
print(json.dumps({
    "modules": sorted(set(sys.modules) - before),
    "threads": threading.active_count(),
    "world": torch.distributed.is_initialized(),
    "cuda": torch.cuda.is_initialized(),
    "grad": torch.is_grad_enabled(),
    "dtype": str(torch.get_default_dtype()),
}))
"""
OPTIONAL = ("IPython", "jax", "matplotlib", "nbclient", "optax", "pandas", "psutil", "safetensors", "scipy", "sklearn")
HEAVY = ("torch._dynamo", "torch._inductor", "torch.distributed.elastic", "torch.distributed.run", "torch.testing")


@pytest.fixture(scope="module")
def imported():
    out = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    return json.loads(out.stdout)


@pytest.mark.parametrize("name", [*OPTIONAL, *HEAVY])
def test_what_is_optional_or_heavy_is_not_imported(imported, name):
    assert [m for m in imported["modules"] if m == name or m.startswith(name + ".")] == []


def test_no_thread_world_or_device_context(imported):
    assert (imported["threads"], imported["world"], imported["cuda"]) == (1, False, False)


def test_torch_is_left_as_it_was(imported):
    assert (imported["grad"], imported["dtype"]) == (True, "torch.float32")


def test_standard_output_and_error_stay_empty():
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import ptrainx"], capture_output=True, text=True, check=True
    )
    assert (run.stdout, run.stderr) == ("", "")
