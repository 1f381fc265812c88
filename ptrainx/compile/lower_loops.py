"""The function that runs a loop: it calls the functions of the loop's pieces, step by step.

What can start ahead of a step is started before the core of the step before; what may be late is finished after the
core of the step behind. A result that only another loop reads stays a list of single values; others are stacked.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.fx import Node

from ptrainx.compile.graph import output_node
from ptrainx.compile.stage_loops import StagedLoop, is_list
from ptrainx.ops.loop.operator import stack_strides

__all__ = ["write_loop"]


class Code(Protocol):
    """What functions are added to."""

    def bind(self, hint: str, value: Any) -> str:
        """A name for an object."""

    def call(self, function: str, arguments: str) -> str:
        """A call of a generated function."""

    def add(self, function: str, lines: list[str], yields: bool, note: str = "") -> None:
        """Adds a function."""

    @property
    def generators(self) -> set[str]:
        """Names of functions that yield."""


def write_loop(code: Code, stem: str, staged: StagedLoop, source: str) -> None:
    """Adds the function `stem`, which calls `{stem}_core`, and `{stem}_ahead` and `{stem}_late` if there are such."""
    loop, form = staged.loop, staged.loop.form
    operands: list[Any] = list(loop.node.args[2:])
    names = [_operand_name(i, form.n_carry, form.n_xs) for i in range(len(operands))]
    lines = [f"[{', '.join(names)}] = args", "args.clear()"]
    xs = range(form.n_carry, form.n_carry + form.n_xs)
    lines += [f"{names[i]} = {names[i]}.unbind(0)" for i in xs if not is_list(operands[i])]
    lines += _make_results(code, staged)
    step, first, last = (-1, form.length - 1, 0) if form.reverse else (1, 0, form.length - 1)

    def slices(index: str, indices: Any) -> list[str]:
        return [f"{names[i]}[{index}]" if i in xs else names[i] for i in indices]

    carry = names[: form.n_carry]
    given = [*carry, *(f"r{i}" for i in staged.early_ys), *(f"h{i}" for i in range(_n_held(staged)))]
    take = code.bind("take", _take)
    core = [
        f"{take}({names[i]}, i)" if i in staged.taken else text
        for i, text in enumerate(slices("i", range(len(operands))))
    ]
    body: list[str] = []
    if staged.ahead is not None:
        lines.append(f"ahead = {code.call(f'{stem}_ahead', _list(slices(str(first), staged.ahead_reads)))}")
        core.append("*now")
        body += [
            "now = ahead",
            f"if i != {last}:",
            f"    ahead = {code.call(f'{stem}_ahead', _list(slices(f'i + {step}', staged.ahead_reads)))}",
        ]
    body += [f"box = {_list(core)}"]
    if staged.ahead is not None:
        body.append("del now")
    if carry:
        body.append(f"del {', '.join(carry)}")
    body.append(f"{_list(given)} = {code.call(f'{stem}_core', 'box')}")
    body += [_put(staged, i, "i") for i in staged.early_ys]
    finish = [
        f"{_list([f'r{i}' for i in staged.late_ys])} = {code.call(f'{stem}_late', 'held')}",
        *(_put(staged, i, "late_i") for i in staged.late_ys),
    ]
    if staged.late is not None:
        lines.append("held = None")
        body += ["if held is not None:", *(f"    {line}" for line in finish)]
        body.append(f"held, late_i = {_list([f'h{i}' for i in range(_n_held(staged))])}, i")
    lines.append(f"for i in range({first}, {last + step}, {step}):")
    lines += [f"    {line}" for line in body]
    if staged.late is not None:
        lines += finish
    n_ys = len(staged.early_ys) + len(staged.late_ys)
    lines.append(f"return {_list([*carry, *(f'y{i}' for i in range(n_ys))])}")
    pieces = {f"{stem}_{kind}" for kind in ("core", "ahead", "late")}
    code.add(stem, lines, bool(pieces & code.generators), f"{form.length} steps, {source}")


def _operand_name(index: int, n_carry: int, n_xs: int) -> str:
    if index < n_carry:
        return f"c{index}"
    return f"x{index - n_carry}" if index < n_carry + n_xs else f"k{index - n_carry - n_xs}"


def _list(items: list[str]) -> str:
    return f"[{', '.join(items)}]"


def _n_held(staged: StagedLoop) -> int:
    return len(list(staged.late.graph.find_nodes(op="placeholder"))) if staged.late is not None else 0


def _make_results(code: Code, staged: StagedLoop) -> list[str]:
    form = staged.loop.form
    results: list[Node] = list(output_node(staged.loop.body.graph).args[0])  # type: ignore[arg-type]
    lines = []
    for i, node in enumerate(results[form.n_carry :]):
        if i in staged.lists:
            lines.append(f"y{i} = [None] * {form.length}")
            continue
        value = node.meta["val"]
        shape, strides = (form.length, *value.shape), stack_strides(value)
        empty = code.bind("empty_strided", torch.empty_strided)
        dtype, device = code.bind("dtype", value.dtype), code.bind("device", value.device)
        lines.append(f"y{i} = {empty}({tuple(map(int, shape))}, {strides}, dtype={dtype}, device={device})")
        lines.append(f"s{i} = y{i}.unbind(0)")
    return lines


def _put(staged: StagedLoop, i: int, index: str) -> str:
    return f"y{i}[{index}] = r{i}" if i in staged.lists else f"s{i}[{index}].copy_(r{i})"


def _take(items: list[torch.Tensor | None], index: int) -> torch.Tensor | None:
    """An item of a list, which lets go of it."""
    item, items[index] = items[index], None
    return item
