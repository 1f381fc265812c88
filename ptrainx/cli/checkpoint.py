"""`ptrainx checkpoint`: what is in a folder of checkpoints, whether it is intact, how two differ, what may go; and
steps written for other tools.

In: the arguments of a subcommand. Out: tables on standard output, and an exit status: 0, or 1 where something is
damaged (`verify`) or differs (`diff`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ptrainx.checkpoint import paths, scalars, steps
from ptrainx.checkpoint.examine import StepSummary, differences, find_step, summaries, verify_step
from ptrainx.checkpoint.foreign.convert import step_to_dcp, step_to_hf
from ptrainx.checkpoint.manager import kept
from ptrainx.checkpoint.manifest import Leaf, Manifest
from ptrainx.checkpoint.match import saved_text
from ptrainx.checkpoint.read import OpenStep
from ptrainx.core.errors import CheckpointError, InputError
from ptrainx.mesh.axes import axes_text
from ptrainx.mesh.partition_spec import P

__all__ = ["COMMANDS", "diff", "export", "ls", "prune", "show", "size_text", "verify"]


def ls(arguments: argparse.Namespace) -> int:
    """Lists the steps of a folder."""
    found = summaries(arguments.folder)
    if arguments.json:
        print(json.dumps([_step_record(summary) for summary in found], indent=1))
        return 0
    if not found:
        raise CheckpointError(f"there is no checkpoint in {arguments.folder}", fix="check the path")
    table = _table("step", "saved", "size", "leaves", "ranks", "metric", "state")
    for summary in found:
        record = _step_record(summary)
        when = "" if summary.saved is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(summary.saved))
        size = "" if summary.manifest is None else size_text(summary.manifest.nbytes)
        cells = [record.get(name) for name in ("leaves", "ranks", "metric")]
        texts = ["" if cell is None else f"{cell:,}" if isinstance(cell, int) else f"{cell:g}" for cell in cells]
        table.add_row(f"{summary.step:,}", when, size, *texts, "damaged" if summary.problem else "whole")
    _console().print(table)
    for summary in found:
        if summary.problem:
            print(f"step {summary.step}: {summary.problem}")
    return 0


def _step_record(summary: StepSummary) -> dict[str, Any]:
    record: dict[str, Any] = {"step": summary.step, "saved": summary.saved, "problem": summary.problem or None}
    manifest = summary.manifest
    if manifest is not None:
        record |= {"bytes": manifest.nbytes, "leaves": len(manifest.leaves), "tensors": len(manifest.tensors)}
        record |= {"ranks": manifest.world, "metric": manifest.metric}
    return record


def show(arguments: argparse.Namespace) -> int:
    """Shows the tree of a step: each leaf with its type, placement and size."""
    path, step = find_step(arguments.path, arguments.step)
    with OpenStep(path, step) as opened:
        manifest = opened.manifest
    records = _leaf_records(manifest)
    if arguments.json:
        print(json.dumps(records, indent=1))
        return 0
    table = _table("leaf", "type", "placement", "size")
    for record in records:
        size = "" if record["bytes"] is None else size_text(record["bytes"])
        size = f"tied to {record['tied']}" if record["tied"] else size
        table.add_row(record["path"], record["type"], record["placement"], size)
    console = _console()
    console.print(table)
    total = sum(tensor.nbytes for tensor in manifest.tensors)
    ranks = f"{manifest.world} rank{'s' * (manifest.world > 1)}"
    console.print(f"step {step:,}: {len(records):,} leaves, {size_text(total)}, written by {ranks}")
    return 0


def _leaf_records(manifest: Manifest) -> list[dict[str, Any]]:
    first: dict[int, str] = {}
    records = []
    for leaf in manifest.leaves:
        name = paths.name(leaf.path)
        record: dict[str, Any] = {"path": name, "type": _type_text(leaf, manifest), "placement": ""}
        record |= {"bytes": None, "tied": None}
        if leaf.tensor is not None:
            tensor = manifest.tensors[leaf.tensor]
            if tensor.mesh is not None:
                record["placement"] = f"{P(*tensor.spec)} on {axes_text(manifest.meshes[tensor.mesh])}"
            owner = first.setdefault(leaf.tensor, name)
            record["tied"] = None if owner == name else owner
            record["bytes"] = tensor.nbytes
        records.append(record)
    return records


def _type_text(leaf: Leaf, manifest: Manifest) -> str:
    if leaf.tensor is not None:
        return saved_text(leaf, manifest)
    return f"{leaf.kind} {scalars.from_text(leaf.kind, leaf.value)!r}"[:60]


def verify(arguments: argparse.Namespace) -> int:
    """Reads steps whole, and tells what is not as it was written."""
    found = [] if arguments.step is not None else steps.found_steps(_folder(arguments.path))
    chosen = [find_step(arguments.path, step) for step in found or [arguments.step]]
    damaged = 0
    for path, step in chosen:
        problems = verify_step(path, step)
        damaged += bool(problems)
        print(f"step {step}: {f'{len(problems)} damaged' if problems else 'as it was written'}", flush=True)
        for problem in problems:
            print(f"  {problem}")
    return 1 if damaged else 0


def diff(arguments: argparse.Namespace) -> int:
    """Tells in which leaves two steps differ."""
    with OpenStep(*find_step(arguments.first)) as a, OpenStep(*find_step(arguments.second)) as b:
        table = _table("leaf", "difference")
        count = 0
        for found in differences(a, b):
            table.add_row(found.path, found.how)
            count += 1
        leaves = len(a.manifest.leaves)
    if count:
        _console().print(table)
    print(f"{count:,} leaves differ" if count else f"the same bits in {leaves:,} leaves")
    return 1 if count else 0


def export(arguments: argparse.Namespace) -> int:
    """Writes a step for other tools."""
    if arguments.to == "dcp" and (arguments.config is not None or arguments.max_shard_bytes is not None):
        given = "--config" if arguments.config is not None else "--max-shard-bytes"
        raise InputError(f"{given} is for --to hf", got="--to dcp", fix=f"leave {given} out")
    size = arguments.max_shard_bytes
    if size is not None and size < 1:
        raise InputError("--max-shard-bytes is less than 1", got=str(size), expected="a positive integer")
    path, step = find_step(arguments.path, arguments.step)
    with OpenStep(path, step) as opened:
        if arguments.to == "dcp":
            out = step_to_dcp(opened, arguments.out, tree=arguments.tree)
        else:
            more = {} if size is None else {"max_shard_bytes": size}
            out = step_to_hf(opened, arguments.out, tree=arguments.tree, config=arguments.config, **more)
    files = [file.stat().st_size for file in out.iterdir()]
    print(f"step {step}: {size_text(sum(files))} in {len(files)} file{'s' * (len(files) != 1)} in {out}")
    return 0


def prune(arguments: argparse.Namespace) -> int:
    """Removes the steps of a folder that no rule keeps; damaged ones stay."""
    for name in ("keep", "every", "best"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise InputError(f"--{name} is less than 1", got=str(value), expected="a positive integer")
    folder = _folder(arguments.folder)
    found = {s.step: s.manifest for s in summaries(folder) if s.manifest is not None}
    metrics = {step: m.metric for step, m in found.items() if m.metric is not None}
    stay = kept(list(found), arguments.keep, arguments.every, arguments.best, metrics, arguments.mode)
    going = sorted(set(found) - stay)
    freed = 0
    for step in going:
        if arguments.dry_run or steps.remove_step(folder, step):
            print(f"step {step}: {'would go' if arguments.dry_run else 'removed'}")
            freed += found[step].nbytes
    print(f"{len(found) - len(going)} steps stay, {size_text(freed)} {'would be ' * arguments.dry_run}freed")
    return 0


def _folder(path: str) -> Path:
    return Path(path).absolute()


def size_text(size: int) -> str:
    """Bytes for people.

    >>> size_text(1_234_567)
    '1.23 MB'
    """
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} B"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column in ("step", "size", "leaves", "ranks", "metric")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    return table


def _console() -> Console:
    return Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=not sys.stdout.isatty())


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "ls": ls,
    "show": show,
    "verify": verify,
    "diff": diff,
    "export": export,
    "prune": prune,
}
"""The subcommands; `checkpoint_options.py` has their arguments."""
