"""Scores any text under trained parameters: mean cross-entropy in nats a byte.

    python examples/gpt/evaluate.py --params runs/NAME/params.safetensors --data FILE

More processes (`ptrainx run -n 2 ...`) share the work.
"""

from __future__ import annotations

import argparse
import sys

import weights
from scoring import make_score

import ptrainx as px
from ptrainx import P


def main() -> None:
    """Prints the score."""
    parser = argparse.ArgumentParser(description="Scores a text in nats a byte.")
    parser.add_argument("--params", metavar="FILE", required=True, help="params.safetensors of a run")
    parser.add_argument("--data", metavar="FILE_OR_FOLDER", required=True, help="the text")
    parser.add_argument("--backend", default="graph", help="of px.jit: graph or eager (default %(default)s)")
    o = parser.parse_args()
    mesh = px.make_mesh(data=-1)
    text = px.data.read_bytes(o.data)
    params, config = weights.load(o.params)
    specs = px.tree.map(lambda _: P(), params)
    loss = make_score(specs, config, mesh, o.backend)(px.device_put(params, specs, mesh), text)
    if mesh.rank == 0:
        print(f"{loss:.4f} nats a byte over {len(text):,} bytes")


if __name__ == "__main__":
    try:
        main()
    except px.errors.PtrainxError as error:
        sys.exit(f"{type(error).__name__}: {error}")
