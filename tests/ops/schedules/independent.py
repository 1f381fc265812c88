"""What the schedules are compared with: longest paths through the graph of what waits for what, and torch's tables."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

from torch.distributed.pipelining import schedules as torch_schedules

LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
COSTS = {"F": 1, "B": 2, "I": 1, "W": 1}


def longest_paths(lists, num_stages: int, costs=COSTS) -> dict[tuple[str, int, int], int]:
    """When each action ends at the earliest, None where it can't: the longest path to it, over edges from the action
    before it in its list, and from what it needs. Written as a recursion from the end, not as a clock."""
    before = {}
    for todo in lists:
        for earlier, later in zip([None, *todo], todo):
            before[tuple(later)] = earlier and tuple(earlier)
    gradient = {(s, m): (kind, s, m) for kind, s, m in before if kind in "BI"}

    def waits_for(kind, s, m):
        yield before[kind, s, m]
        if kind == "F" and s > 0:
            yield "F", s - 1, m
        if kind in "BI":
            yield "F", s, m
            if s + 1 < num_stages:
                yield gradient[s + 1, m]
        if kind == "W":
            yield "I", s, m

    @cache
    def end(action):
        return max((end(other) for other in waits_for(*action) if other), default=0) + costs[action[0]]

    # In rounds, so that a long chain is no deep recursion.
    return {action: end(action) for action in sorted(before, key=lambda a: (a[2], "FBIW".index(a[0]), a[1]))}


def torch_table(name: str, p: int, m: int, chunks: int) -> list[list[tuple[str, int, int]]]:
    """torch's order of computations, pairs that it overlaps one after the other."""
    num_stages = p * chunks
    stages = [
        SimpleNamespace(
            stage_index=s, num_stages=num_stages, group_size=p, group_rank=0, submod=None,
            is_first=s == 0, is_last=s == num_stages - 1, has_backward=True,
        )
        for s in range(0, num_stages, p)
    ]  # fmt: skip
    made = torch_schedules.get_schedule_class(name)(stages[0] if chunks == 1 and name == "GPipe" else stages, m)
    tables = []
    for rank in range(p):
        actions = [a for action in made.pipeline_order[rank] if action for a in (action.sub_actions or (action,))]
        computed = [a for a in actions if a.computation_type.name in LETTERS]
        tables.append([(LETTERS[a.computation_type.name], a.stage_index, a.microbatch_index) for a in computed])
    return tables
