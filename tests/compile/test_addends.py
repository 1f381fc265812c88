"""A replicated value that joins an owed sum becomes addends exactly, in every dtype and for every number of ranks."""

import pytest
import torch

import ptrainx as px
from ptrainx import P
from ptrainx.core.torch_compat_partial import make_addends_exact


def joined(x, y):
    return x.sum(0) + y


@pytest.mark.parametrize("backend", ["graph", "eager"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.float64, torch.bfloat16])
def test_joined_sums(dtype, ranks, backend):
    x = torch.arange(ranks * 2 * 3).reshape(ranks * 2, 3).to(dtype)
    y = torch.tensor([1, 7, 1001]).to(dtype)  # thirds of these have no exact float
    mesh = px.make_mesh(data=ranks, simulate=True)
    got = px.device_get(px.jit(joined, mesh=mesh, in_specs=(P("data"), P()), backend=backend)(x, y))
    want = joined(x, y)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want)


def test_torch_still_divides():
    """When this fails, torch keeps the dtype by itself: `make_addends_exact` can go."""
    from torch.distributed.tensor import Partial

    class OneRank:
        def size(self, mesh_dim):
            return 2

        def _is_current_rank_part_of_mesh(self):
            return True

    divided = Partial("sum")._partition_value(torch.tensor([3]), OneRank(), 0)
    assert divided.dtype is torch.float32
    undo = make_addends_exact()
    undo()
    assert Partial("sum")._partition_value(torch.tensor([3]), OneRank(), 0).dtype is torch.float32
