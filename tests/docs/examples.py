"""What the pages' blocks need around them: names that a page takes for given, and where a page has to run alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ptrainx as px
from tests.docs.pages import ROOT, Block, blocks, name_of, run

README_PRELUDE = """
import functools
import numpy as np
import torch
import torch.nn.functional as F
import ptrainx as px

def model_init(key):
    k_in, k_qkv, k_o, k_up, k_down, k_out = px.random.split(key, 6)
    normal = lambda key, *shape: px.random.normal(key, shape) / shape[0] ** 0.5
    block = {"qkv": normal(k_qkv, 16, 48), "o": normal(k_o, 16, 16),
             "up": normal(k_up, 16, 64), "down": normal(k_down, 64, 16)}
    return {"embed": normal(k_in, 32, 16), "blocks": [block], "head": normal(k_out, 16, 32)}

def loss_fn(params, batch):
    x = F.embedding(batch["tokens"], params["embed"])
    for block in params["blocks"]:
        q, k, v = (x @ block["qkv"]).unflatten(-1, (3, 4, 4)).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2) @ block["o"]
        x = x + F.gelu(x @ block["up"]) @ block["down"]
    logits = x @ params["head"]
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

_tokens = np.arange(64 * 9).reshape(64, 9) % 32
source = {"tokens": _tokens[:, :-1], "targets": _tokens[:, 1:]}
"""
"""A tiny model and data for the README's program, which takes its reader's own for given."""

SIMULATED = {"px.make_mesh(data=2, model=2)": "px.make_mesh(data=2, model=2, simulate=True)"}
"""The README's program, in one process."""

ALONE = {"docs/how-to/launch.md"}
"""Pages that start processes: run as a program of their own, which has joined no world."""


def python_blocks(page: Path) -> list[Block]:
    """The blocks of a page that run."""
    return [block for block in blocks(page) if block.language == "python"]


def run_page(page: Path) -> list[str]:
    """What each python block of a page prints."""
    code = python_blocks(page)
    if name_of(page) in ALONE:
        return _run_alone(code)
    namespace: dict[str, object] = {"__name__": "__main__"}
    if name_of(page) == "README.md":
        exec(README_PRELUDE, namespace)
        for block in code:
            for real, small in SIMULATED.items():
                block.text = block.text.replace(real, small)
    try:
        return run(code, namespace)
    finally:
        px.shutdown()


def _run_alone(code: list[Block]) -> list[str]:
    mark = "-- end of block --"
    source = "".join(f"{block.text}\nprint({mark!r}, flush=True)\n" for block in code)
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(mark + "\n")[: len(code)]
