"""Mistakes around pipelines are told with what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ptrainx as px
from ptrainx import P
from ptrainx.core.errors import InputError, PtrainxError, SpecError, TreeError
from tests.ops.pipeline.programs import embed, head_loss, layer, specs, values


def run(stage: Any = layer, head: Any = head_loss, m: int = 4, in_specs: Any = None, **options: Any) -> Any:
    fn = px.pipeline(stage, prologue=embed, epilogue=head, num_microbatches=m, **options)
    mesh = px.make_mesh(pipe=2, simulate=True)
    return px.jit(fn, mesh=mesh, in_specs=in_specs or specs({"pipe": 2}))(*values(4))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: run(m=7), InputError, "48 rows.*7 microbatches do not divide"),
        (lambda: run(m=0), InputError, "num_microbatches=0"),
        (lambda: run(schedule="1f1b"), InputError, "px.schedules.get"),
        (lambda: run(lambda w, x, mb: x[:, :3]), InputError, r"stage_fn changes x[\s\S]*f64\[12,3\][\s\S]*f64\[12,6\]"),
        (lambda: run(lambda w, x, mb: x.float()), InputError, r"stage_fn changes x[\s\S]*f32"),
        (lambda: run(lambda w, x, mb: (x, x)), TreeError, "changes the structure of x"),
        (lambda: run(head=lambda s, x, mb: x), InputError, "epilogue's loss is no scalar"),
        (lambda: run(has_aux=True), TreeError, r"does not return a pair \(x, aux\)"),
        (lambda: run(in_specs=(P(), P(), P())), SpecError, r"is not placed on 'pipe' by layers"),
        (lambda: run(in_specs=(P("pipe"), P(), P("pipe"))), SpecError, "'pipe'"),
    ],
)
def test_bad_input(call: Any, error: type[PtrainxError], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


def test_a_schedule_that_waits_for_ever_is_refused_by_its_first_bad_action() -> None:
    """Also one that only shows for a number of microbatches, when the step is traced."""

    def order(num_ranks: int, num_microbatches: int) -> Any:
        return [[("B", 0, 0), ("F", 0, 0)], [("F", 1, 0), ("B", 1, 0)]]

    stuck = px.schedules.Custom(order)
    grad = px.grad(px.pipeline(layer, prologue=embed, epilogue=head_loss, num_microbatches=1, schedule=stuck))
    step = px.jit(grad, mesh=px.make_mesh(pipe=2, simulate=True), in_specs=specs({"pipe": 2}))
    with pytest.raises(px.errors.ScheduleError, match=r"rank 0, position 0: B\(stage 0, microbatch 0\)"):
        step(*values(4))


def test_what_a_stage_raises_is_what_the_user_sees() -> None:
    def stage(weights: Any, x: Any, microbatch: Any) -> torch.Tensor:
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        run(stage)
