"""Two operators that torch lacks, in its namespace `ptrainx`.

    ppermute(x, sources, group)     on member j of the group: the x of member sources[j]; zeros where that is -1
    axis_index(place, axis, device) this rank's place along an axis, as a 0-d tensor

The place is written into each rank's graph. Since the axis stands beside it, and no pass looks into either, the graphs
of all ranks stay alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ptrainx.core import torch_compat as tc

__all__ = ["AXIS_INDEX", "PPERMUTE"]


def _ppermute(x: Tensor, sources: Sequence[int], group: str) -> Tensor:
    """The eager form, over a process group."""
    members = tc.resolve_process_group(group)
    flat, me = x.contiguous().view(-1), members.rank()
    gives = [flat.numel() if me == source else 0 for source in sources]
    takes = [flat.numel() if sources[me] == member else 0 for member in range(len(sources))]
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    members.alltoall_base(out.view(-1)[: sum(takes)], flat[: sum(gives)], takes, gives).wait()
    return out


def _axis_index(place: int, axis: str, device: torch.device) -> Tensor:
    return torch.tensor(place, device=device)


# A fragment, so that other rooms may add operators to the namespace. Kept, since its end would take the operators away.
_LIBRARY = torch.library.Library("ptrainx", "FRAGMENT")
_LIBRARY.define("ppermute(Tensor x, int[] sources, str group) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("ppermute", _ppermute, "CompositeExplicitAutograd")
_LIBRARY.impl("ppermute", lambda x, sources, group: torch.empty_like(x, memory_format=torch.contiguous_format), "Meta")
_LIBRARY.define("axis_index(int place, str axis, Device device) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("axis_index", _axis_index, "CompositeExplicitAutograd")

PPERMUTE = torch.ops.ptrainx.ppermute.default
AXIS_INDEX = torch.ops.ptrainx.axis_index.default
