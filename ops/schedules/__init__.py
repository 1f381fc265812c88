"""In which order the ranks of a pipeline compute: schedules, their tables, what these promise, pictures of them."""

from ptrainx.ops.schedules.actions import Action
from ptrainx.ops.schedules.clock import Span, Timeline
from ptrainx.ops.schedules.custom import Custom
from ptrainx.ops.schedules.dualpipev import DualPipeV
from ptrainx.ops.schedules.gpipe import GPipe
from ptrainx.ops.schedules.interleaved import Interleaved1F1B
from ptrainx.ops.schedules.one_f_one_b import OneFOneB
from ptrainx.ops.schedules.registry import get, names, register
from ptrainx.ops.schedules.schedule import Schedule
from ptrainx.ops.schedules.table import Table
from ptrainx.ops.schedules.zbv import ZBV
from ptrainx.ops.schedules.zero_bubble import ZeroBubble

__all__ = [
    "ZBV",
    "Action",
    "Custom",
    "DualPipeV",
    "GPipe",
    "Interleaved1F1B",
    "OneFOneB",
    "Schedule",
    "Span",
    "Table",
    "Timeline",
    "ZeroBubble",
    "get",
    "names",
    "register",
]
