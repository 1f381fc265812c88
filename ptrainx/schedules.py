"""`px.schedules`: in which order the ranks of a pipeline compute; see `ptrainx.ops.schedules`."""

from ptrainx.ops.schedules import (
    ZBV,
    Action,
    Custom,
    DualPipeV,
    GPipe,
    Interleaved1F1B,
    OneFOneB,
    Schedule,
    Span,
    Table,
    Timeline,
    ZeroBubble,
    get,
    names,
    register,
)

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
