"""What one entry of a schedule is, and what has to be done before it.

In: nothing. Next: `table` holds a list of actions for each rank.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["KINDS", "Action", "needs"]

KINDS = {
    "F": "forward",
    "B": "backward: gradients of the stage's input and of its weights",
    "I": "gradient of the stage's input",
    "W": "gradient of the stage's weights",
}
"""The kinds of actions."""


class Action(NamedTuple):
    """One stage's work on one microbatch. Sends and receives follow from these, and are in no schedule.

    Attributes:
        kind: "F" forward; "B" backward; or in its place "I", the gradient of the stage's input, which the stage before
            it waits for, and later "W", the gradient of its weights, which nobody waits for.
        stage: 0 to S - 1, in the order in which data passes through them.
        microbatch: 0 to M - 1.

    >>> print(Action("F", stage=0, microbatch=2))
    F(stage 0, microbatch 2)
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, microbatch {self.microbatch})"


def needs(action: Action, num_stages: int) -> tuple[Action, ...]:
    """What has to be done before an action; "I" stands for the input's gradient, be it by "I" or by "B".

    >>> [str(need) for need in needs(Action("B", 1, 0), num_stages=3)]
    ['F(stage 1, microbatch 0)', 'I(stage 2, microbatch 0)']
    """
    kind, stage, microbatch = action
    if kind == "F":
        return (Action("F", stage - 1, microbatch),) if stage > 0 else ()
    if kind == "W":
        return (Action("I", stage, microbatch),)
    own = Action("F", stage, microbatch)
    return (own, Action("I", stage + 1, microbatch)) if stage < num_stages - 1 else (own,)
