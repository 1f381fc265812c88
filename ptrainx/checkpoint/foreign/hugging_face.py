"""Reading model weights that Hugging Face's tools have written, onto any mesh; each rank reads its own slices.

In: a folder as `save_pretrained` leaves it, and the tree that is wanted. Out: the tree. Without an adapter a leaf's
name is its path with dots: `{"model": {"layers": [{"q_proj": {"weight": ...}}]}}` has the name that transformers and
`torch.nn.Module.state_dict` have, `model.layers.0.q_proj.weight`. With one, its table says what a leaf is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ptrainx.checkpoint import paths
from ptrainx.checkpoint.boxes import Box, cut, inside, meet
from ptrainx.checkpoint.dtypes import DTYPES
from ptrainx.checkpoint.foreign.registry import table_of
from ptrainx.checkpoint.foreign.safetensors_reader import WeightFiles
from ptrainx.checkpoint.foreign.strided import SPAN
from ptrainx.checkpoint.foreign.tables import Adapter, MappedLeaf, Table, identity
from ptrainx.checkpoint.targets import Target, fill, targets
from ptrainx.core import tree as px_tree
from ptrainx.core.avals import ShapeDtypeStruct
from ptrainx.core.errors import CheckpointError, CheckpointMismatchError, InputError
from ptrainx.mesh.mesh import Mesh
from ptrainx.mesh.spec_tree import SpecTree

__all__ = ["CONFIG", "config_of", "dotted", "hf_shapes", "import_hf", "near_names", "slashed"]

CONFIG = "config.json"


def import_hf(
    folder: str | Path,
    like: Any = None,
    *,
    specs: SpecTree = None,
    mesh: Mesh | None = None,
    adapter: str | Adapter | None = None,
) -> Any:
    """Reads tensors from `model.safetensors`, or from the files of its index; each rank its own slices.

    Args:
        folder: with the weights of a model, as `save_pretrained` leaves it.
        like: the tree that is wanted, as values or shapes. Tensors that it does not name are left out. By default the
            tree of `hf_shapes(folder)`.
        specs, mesh: as for `restore`.
        adapter: a model type or an adapter, which says what the leaves of `like` are in the files. By default, paths
            with dots are the names in the files; where `like` is left out, the `model_type` of `config.json`.

    Returns:
        the tree.

    Raises:
        CheckpointMismatchError: tensors that are missing, or of another shape or dtype; all are told.
        CheckpointDamageError: a file that is no safetensors file, or an index that is none.
        CheckpointError: no weights are there.
        InputError: there is no adapter for the model.
    """
    folder = Path(folder).absolute()
    with WeightFiles(folder) as files:
        known = None
        if like is None or adapter is not None:
            known = table_of(config_of(folder), adapter)
            like = _shapes(known, {}, files) if like is None else like
        wanted = targets(like, specs, mesh)
        leaves = [_leaf(target, known) for target in wanted.targets]
        _match(files, wanted.targets, leaves, known)
        values = [_value(target, leaf, files, known) for target, leaf in zip(wanted.targets, leaves) if leaf]
    return px_tree.unflatten(wanted.treedef, values)


def hf_shapes(
    model: Any,
    *,
    stacked: bool = False,
    joined: bool = False,
    adapter: str | Adapter | None = None,
) -> Any:
    """The tree of a model's parameters, as shapes: for `match_rules`, and as `like` of `import_hf`.

    Args:
        model: a folder with `config.json` and weights, whose dtypes the shapes have; or what stands in `config.json`,
            or a config of transformers, whose dtype they have (by default float32).
        stacked: whether the layers are one dict of weights, each with a first dim for the layer, as `px.scan` takes
            them; or a list with a dict a layer.
        joined: whether queries, keys and values are one leaf `qkv`, and a gated MLP's first two matrices one leaf
            `gate_up`, side by side.
        adapter: a model type or an adapter; by default the config's `model_type`.

    Returns:
        a tree of `px.ShapeDtypeStruct`.

    Raises:
        InputError: there is no adapter for the model; its config lacks something.
        CheckpointError: the folder has no config, no weights, or is damaged.

    >>> config = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_positions": 1024, "n_layer": 12}
    >>> hf_shapes(config)["layers"][0]["q"]
    f32[768,768]
    >>> hf_shapes(config, stacked=True, joined=True)["layers"]["qkv"]
    f32[12,768,2304]
    """
    known = table_of(config_of(model), adapter)
    form = {"stacked": stacked, "joined": joined}
    if not isinstance(model, (str, Path)):
        return _shapes(known, form, dtype=_dtype_in(config_of(model)))
    with WeightFiles(Path(model).absolute()) as files:
        return _shapes(known, form, files)


def config_of(model: Any) -> Mapping[str, Any]:
    """What stands in a `config.json`, from a mapping, a folder, a file, or a config of transformers.

    Raises:
        CheckpointError: there is no such file.
        InputError: it holds something else.
    """
    if isinstance(model, Mapping):
        return model
    if hasattr(model, "to_dict"):
        return model.to_dict()
    path = Path(model)
    path = path / CONFIG if path.is_dir() else path
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}", fix="check the path") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no config", got=str(error), expected="a JSON object") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} is no config", got=type(found).__name__, expected="a JSON object")
    return found


def _dtype_in(config: Mapping[str, Any]) -> torch.dtype:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise InputError("the config names a dtype that torch lacks", got=name, expected="float32, bfloat16, ...")
    return DTYPES[name].dtype


def _shapes(
    known: Table, form: Mapping[str, bool], files: WeightFiles | None = None, dtype: torch.dtype = torch.float32
) -> Any:
    tree: dict[str, Any] = {}
    for path, leaf in known.chosen(**{"stacked": False, "joined": False, **form}).items():
        *above, last = path.split("/")
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        stored = None if files is None else files.tensors.get(_found_name(leaf.parts[0].name, files, known))
        node[last] = ShapeDtypeStruct(leaf.shape, DTYPES[stored.dtype].dtype if stored and stored.dtype else dtype)
    return _with_lists(tree)


def _with_lists(tree: Any) -> Any:
    """Dicts whose keys count from 0 as lists."""
    if not isinstance(tree, dict):
        return tree
    values = [_with_lists(value) for value in tree.values()]
    counted = bool(tree) and list(tree) == [str(i) for i in range(len(tree))]
    return values if counted else dict(zip(tree, values))


def dotted(path: Sequence[Any]) -> str:
    """A path as the names of a state dict are written."""
    return ".".join(str(key) for key in path)


def slashed(path: Sequence[Any]) -> str:
    """A path as `match_rules` and tables have it."""
    return "/".join(str(key) for key in path)


def _keys(target: Target) -> list[Any]:
    return [key for _, key in target.path]


def _leaf(target: Target, known: Table | None) -> MappedLeaf | None:
    if known is None:
        return identity(dotted(_keys(target)), target.shape or ())
    return known.leaves.get(slashed(_keys(target)))


def _found_name(name: str, files: WeightFiles, known: Table | None) -> str:
    """The name of a tensor in the files: those of a model without its head lack the prefix."""
    if known is not None and name not in files.tensors:
        short = name.removeprefix(known.architecture.prefix)
        return short if short in files.tensors else name
    return name


def near_names(name: str, names: Sequence[str]) -> str:
    """`; it has a and b`, or nothing, where no name is near."""
    near = paths.near((("field", name),), [(("field", other),) for other in names])
    return f"; it has {' and '.join(text.removeprefix('.') for text in near)}" if near else ""


def _match(
    files: WeightFiles, wanted: Sequence[Target], leaves: Sequence[MappedLeaf | None], known: Table | None
) -> None:
    problems = []
    for target, leaf in zip(wanted, leaves):
        path = slashed(_keys(target))
        if leaf is None:
            assert known is not None
            near = near_names(path, list(known.leaves))
            problems.append(f"{path}: no leaf of a {known.architecture.name}{near}")
        elif known is not None and target.shape != leaf.shape:
            problems.append(f"{path}: the model has {list(leaf.shape)}, like has {target.text}")
        else:
            problems += [problem for part in leaf.parts if (problem := _unlike(part, target, files, known))]
    if problems:
        raise CheckpointMismatchError(
            f"{files.path} does not fit like:\n    " + "\n    ".join(problems),
            fix="pass like= with the names, shapes and dtypes of the files",
        )


def _unlike(part: Any, target: Target, files: WeightFiles, known: Table | None) -> str:
    name = _found_name(part.name, files, known)
    where = name if known is None else f"{slashed(_keys(target))}: {name}"
    if name not in files.tensors:
        return f"{where}: not in the files{near_names(name, list(files.tensors))}"
    stored = files.tensors[name]
    if target.shape is None or not target.dtype:
        return f"{where}: like has {target.text}, which is no tensor"
    if known is not None and stored.shape != part.stored:
        return f"{where}: {stored} in the files, the config has {list(part.stored)}"
    if stored.shape != part.stored or stored.code != DTYPES[target.dtype].code:
        return f"{where}: {stored} in the files, like has {target.text}"
    return ""


def _value(target: Target, leaf: MappedLeaf, files: WeightFiles, known: Table | None) -> Any:
    """A leaf: its local tensors filled from the parts that they meet; equal boxes are read once."""

    def read(box: Box, place: torch.Tensor) -> None:
        for part in leaf.parts:
            shared = meet(part.place, box)
            name = _found_name(part.name, files, known)
            if shared is not None and part.transposed:
                # Read in order, then turned, which torch does in blocks; some rows of the leaf at a time.
                for rows in cut(shared, -(-shared.size * place.dtype.itemsize // SPAN)):
                    held = torch.empty(part.source(rows).shape, dtype=place.dtype)
                    files.read(name, part.source(rows), held)
                    part.as_stored(place[inside(rows, box.offset)]).t().copy_(held.t())
            elif shared is not None:
                files.read(name, part.source(shared), part.as_stored(place[inside(shared, box.offset)]))

    return target.build(fill(target, DTYPES[target.dtype].dtype, read))
