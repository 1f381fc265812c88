"""Ordered reductions: a device runs the programs of several logical ranks, as one graph, so bits depend on the logical
mesh alone.

| | |
|---|---|
| `builder.py` | nodes added once, whichever rank asks for them |
| `merge.py` | the ranks' graphs, walked together from collective to collective |
| `exchange.py` | what a collective of logical ranks is on their devices: sums in a fixed tree |
| `loops.py` | a loop whose body is the merged body |
| `boundary.py` | between a device's part of a value and those of its logical ranks |
| `host.py` | all of it, in order |
| `settle.py` | alignment and threads, on which kernels' bits may hang |
"""

from ptrainx.compile.hosted.host import host_graphs
from ptrainx.compile.hosted.settle import one_thread, settled, settled_generator

__all__ = ["host_graphs", "one_thread", "settled", "settled_generator"]
