"""The named collectives: what ranks exchange inside a `shard_map`, each differentiable."""

from ptrainx.ops.collectives.all_gather import all_gather
from ptrainx.ops.collectives.all_to_all import all_to_all
from ptrainx.ops.collectives.axis_index import axis_index, axis_size
from ptrainx.ops.collectives.pcast import pcast
from ptrainx.ops.collectives.pmax import pmax, pmin
from ptrainx.ops.collectives.ppermute import ppermute
from ptrainx.ops.collectives.psum import pmean, psum
from ptrainx.ops.collectives.psum_scatter import psum_scatter

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "pcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
]
