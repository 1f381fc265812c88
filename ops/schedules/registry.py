"""Schedules by name: ours, and those of users and installed packages, registered alike."""

from __future__ import annotations

import functools
import importlib.metadata

from ptrainx.core.errors import InputError
from ptrainx.ops.schedules.dualpipev import DualPipeV
from ptrainx.ops.schedules.gpipe import GPipe
from ptrainx.ops.schedules.interleaved import Interleaved1F1B
from ptrainx.ops.schedules.one_f_one_b import OneFOneB
from ptrainx.ops.schedules.schedule import Schedule
from ptrainx.ops.schedules.zbv import ZBV
from ptrainx.ops.schedules.zero_bubble import ZeroBubble

__all__ = ["ENTRY_POINTS", "get", "names", "register"]

ENTRY_POINTS = "ptrainx.schedules"
"""Entry points of installed packages: functions without arguments that register schedules, called once, when needed."""

_schedules: dict[str, Schedule] = {}


def register(name: str, schedule: Schedule) -> None:
    """Gives a schedule a name, as programs take it on their command lines. It replaces one that has the name.

    Args:
        name: such as `"zb"`.
        schedule: the schedule.

    Raises:
        InputError: what is no schedule, or no name.

    >>> from ptrainx.ops.schedules import Interleaved1F1B, get, register
    >>> register("interleaved4", Interleaved1F1B(chunks=4))
    >>> get("interleaved4").chunks
    4
    """
    if not isinstance(name, str) or not name:
        raise InputError("schedules.register: no name", got=repr(name), expected="a word, such as 'mine'")
    if not isinstance(schedule, Schedule):
        raise InputError(
            f"schedules.register: {name!r} is given no schedule",
            got=repr(schedule),
            expected="a px.schedules.Schedule",
            fix="pass an instance, such as OneFOneB(), or wrap a table or function in px.schedules.Custom",
        )
    _schedules[name] = schedule


def get(name: str) -> Schedule:
    """The schedule of a name: `1f1b`, `gpipe`, `interleaved`, `zb`, `zbv`, `dualpipev`, and what was registered.

    Args:
        name: the name.

    Raises:
        InputError: an unknown one.

    >>> get("zb")
    ZeroBubble()
    """
    if name not in _schedules:
        _of_packages()
    if name not in _schedules:
        raise InputError(
            "schedules.get: an unknown schedule",
            got=repr(name),
            expected=f"one of {', '.join(names())}",
            fix="register it with px.schedules.register(name, schedule)",
        )
    return _schedules[name]


def names() -> list[str]:
    """All names that `get` knows, in order."""
    _of_packages()
    return sorted(_schedules)


@functools.cache
def _of_packages() -> None:
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        entry.load()()


register("1f1b", OneFOneB())
register("dualpipev", DualPipeV())
register("gpipe", GPipe())
register("interleaved", Interleaved1F1B())
register("zb", ZeroBubble())
register("zbv", ZBV())
