"""From a user's function to a program: trace, graph, passes, lower, executable."""

from ptrainx.compile.comms import Comm, CommReport
from ptrainx.compile.stages import Compiled, Lowered, Traced

__all__ = ["Comm", "CommReport", "Compiled", "Lowered", "Traced"]
