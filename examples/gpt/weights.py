"""Parameters in one safetensors file: a tensor a leaf, named by its path (`blocks/0/q`), the sizes in the metadata."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import model
from model import Config
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import ptrainx as px

__all__ = ["load", "save"]


def save(path: str | Path, params: Any, config: Config) -> None:
    """Writes parameters, which are CPU tensors (see `px.device_get`)."""
    pairs, _ = px.tree.flatten_with_path(params)
    tensors = {px.tree.path_str(where): leaf.contiguous() for where, leaf in pairs}
    save_file(tensors, path, metadata={"config": json.dumps(dataclasses.asdict(config))})


def load(path: str | Path) -> tuple[Any, Config]:
    """(parameters, sizes) that `save` wrote.

    Raises:
        DataError: the file is missing, is no such file, or lacks a parameter.
    """
    try:
        with safe_open(path, framework="pt") as file:
            config = Config(**json.loads((file.metadata() or {})["config"]))
            names, treedef = px.tree.flatten_with_path(shapes(config))
            return px.tree.unflatten(treedef, [file.get_tensor(px.tree.path_str(where)) for where, _ in names]), config
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise px.errors.DataError(
            f"{path} holds no parameters of this model: {error}", fix="pass the params.safetensors of a run"
        ) from error


def shapes(config: Config) -> Any:
    """The parameters' shapes and dtypes; nothing is computed."""
    return px.eval_shape(lambda key: model.init(key, config), px.random.key(0))
