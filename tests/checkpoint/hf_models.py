"""The example models, as the tests of weights use them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch

import ptrainx as px
from ptrainx import P

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "hf"
"""What transformers wrote: `with_transformers.py --write`."""


def example(name: str) -> Any:
    """A module of `examples/hugging_face`."""
    key = f"examples_hugging_face_{name}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, ROOT / "examples" / "hugging_face" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[key] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[key])
    return sys.modules[key]


def config_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def random_tree(shapes: Any) -> Any:
    """Values for shapes: every leaf from a key of its own, norms around 1."""

    def draw(path: Any, leaf: Any) -> torch.Tensor:
        key = px.random.fold_in(px.random.key(0), sum(map(ord, px.tree.path_str(path))))
        return px.random.normal(key, leaf.shape) * 0.3 + ("norm" in str(path[-1]))

    return px.tree.map_with_path(draw, shapes)


def read(folder: Path, mesh: px.Mesh | None = None, **form: bool) -> tuple[Any, Any]:
    """(parameters, specs) from a folder, on one device or a mesh, in a form of `hf_shapes`."""
    shapes = px.checkpoint.hf_shapes(folder, **form)
    specs = None if mesh is None else px.match_rules(example("sharding").RULES, shapes)
    kind = config_in(folder)["model_type"]
    return px.checkpoint.import_hf(folder, shapes, specs=specs, mesh=mesh, adapter=kind), specs


def logits(params: Any, tokens: torch.Tensor, config: Any, mesh: px.Mesh | None = None, specs: Any = None) -> Any:
    """Logits of the example's function, on one device, or on a mesh with axes `data` and `model`."""
    model = example("gpt2" if config["model_type"] == "gpt2" else "llama")
    if mesh is None:
        return model.logits(params, tokens, config)
    step = px.jit(lambda p, t: model.logits(p, t, config), mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data"))
    return px.device_get(step(params, tokens))
