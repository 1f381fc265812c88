"""The arguments of `ptrainx checkpoint`; `checkpoint.py` does what they ask."""

from __future__ import annotations

import argparse
from collections.abc import Callable

__all__ = ["add_checkpoint"]


def add_checkpoint(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], run: Callable[[argparse.Namespace], int]
) -> None:
    """Adds the command with its subcommands; `run` gets the arguments, the subcommand's name in `action`."""
    parser = commands.add_parser(
        "checkpoint", help="look at checkpoints, verify, export, prune them", allow_abbrev=False
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    for name, (add, text) in _ACTIONS.items():
        action = actions.add_parser(name, help=text, description=f"{text.capitalize()}.", allow_abbrev=False)
        add(action)
        action.set_defaults(command=run)


def _ls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="of steps")
    parser.add_argument("--json", action="store_true", help="as JSON")


def _show(parser: argparse.ArgumentParser) -> None:
    _one(parser)
    parser.add_argument("--json", action="store_true", help="as JSON")


def _one(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a folder of steps, or of one step")
    parser.add_argument("--step", type=int, metavar="N", help="which step")


def _diff(parser: argparse.ArgumentParser) -> None:
    for name in ("first", "second"):
        parser.add_argument(name, metavar=name.upper(), help="a step's folder, or a folder of steps: its newest")


def _export(parser: argparse.ArgumentParser) -> None:
    _one(parser)
    parser.add_argument("out", metavar="OUT", help="the folder to write, best a new one")
    parser.add_argument("--to", choices=("hf", "dcp"), required=True, help="safetensors files, or PyTorch's DCP")
    parser.add_argument("--tree", default="", metavar="PATH", help="which part of the tree, such as params")
    parser.add_argument("--config", metavar="FILE", help="a model's config.json: names as transformers has them")
    parser.add_argument("--max-shard-bytes", type=int, metavar="N", help="of a safetensors file (default 5 GB)")


def _prune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="of steps")
    parser.add_argument("--keep", type=int, metavar="N", required=True, help="how many of the newest stay")
    parser.add_argument("--every", type=int, metavar="N", help="steps that N divides stay")
    parser.add_argument("--best", type=int, metavar="N", help="how many of the best by metric stay")
    parser.add_argument("--mode", choices=("min", "max"), default="min", help="which metric is best (default min)")
    parser.add_argument("-n", "--dry-run", action="store_true", help="tell what would go, and remove nothing")


_ACTIONS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str]] = {
    "ls": (_ls, "list the steps of a folder"),
    "show": (_show, "show the tree of a step"),
    "verify": (_one, "read steps whole, and tell what is not as it was written"),
    "diff": (_diff, "tell in which leaves two steps differ"),
    "export": (_export, "write a step for other tools"),
    "prune": (_prune, "remove old steps"),
}
