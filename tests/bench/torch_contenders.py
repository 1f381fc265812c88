"""PyTorch's own ways to train the model on two ranks: DDP, FSDP2, compiled or not, and plain DTensors.

Each function builds one contender on one rank: `(size, rank) -> step`, where `step()` does one whole training step and
gives this rank's loss; the mean over ranks is the loss of the whole batch. All use fused AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

from tests.bench.model import SIZES, optimizer_settings
from tests.bench.torch_model import GPT, attend, block, embed, head, loss_fn, torch_batch, torch_params

__all__ = [
    "compute_alone",
    "compute_compiled",
    "ddp",
    "ddp_compiled",
    "dtensor",
    "fsdp2",
    "fsdp2_compiled",
    "fsdp2_fast",
    "fsdp2_fast_compiled",
    "one_device",
    "simple_fsdp",
    "simple_fsdp_compiled",
]

RANKS = 2
Step = Callable[[], torch.Tensor]


def _adamw(params: Any) -> torch.optim.Optimizer:
    settings = optimizer_settings()
    return torch.optim.AdamW(
        params,
        lr=settings["learning_rate"],
        betas=(settings["b1"], settings["b2"]),
        eps=settings["eps"],
        weight_decay=0.0,
        fused=True,
    )


def _module_step(net: Callable[..., torch.Tensor], params: Any, data: tuple[torch.Tensor, torch.Tensor]) -> Step:
    optimizer = _adamw(params)

    def step() -> torch.Tensor:
        loss = net(*data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _rows(size: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = torch_batch(size)
    return tokens.chunk(RANKS)[rank], targets.chunk(RANKS)[rank]


def one_device(size: str, rank: int) -> Step:
    """The whole batch on one device: the right answer that losses are compared with."""
    net = GPT(size)
    return _module_step(net, net.parameters(), torch_batch(size))


def compute_alone(size: str, rank: int) -> Step:
    """A rank's rows with no communication: what any contender pays for the arithmetic, when it runs as PyTorch's."""
    net = GPT(size)
    return _module_step(net, net.parameters(), _rows(size, rank))


def compute_compiled(size: str, rank: int) -> Step:
    """The same under torch.compile: the arithmetic at Inductor's price."""
    net = GPT(size)
    return _module_step(torch.compile(net), net.parameters(), _rows(size, rank))


def _wrapped(size: str) -> nn.Module:
    return nn.parallel.DistributedDataParallel(GPT(size), gradient_as_bucket_view=True, static_graph=True)


def ddp(size: str, rank: int) -> Step:
    """DistributedDataParallel."""
    net = _wrapped(size)
    return _module_step(net, net.parameters(), _rows(size, rank))


def ddp_compiled(size: str, rank: int) -> Step:
    """DistributedDataParallel under torch.compile."""
    net = _wrapped(size)
    return _module_step(torch.compile(net), net.parameters(), _rows(size, rank))


def _sharded(size: str) -> nn.Module:
    net, mesh = GPT(size), init_device_mesh("cpu", (RANKS,))
    for layer in net.blocks:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def fsdp2(size: str, rank: int) -> Step:
    """FSDP2, a unit a layer."""
    net = _sharded(size)
    return _module_step(net, net.parameters(), _rows(size, rank))


def fsdp2_compiled(size: str, rank: int) -> Step:
    """FSDP2 under torch.compile."""
    net = _sharded(size)
    return _module_step(torch.compile(net), net.parameters(), _rows(size, rank))


class _ScatterByExchange(ReduceScatter):
    """A reduce-scatter as an all-to-all and a local sum, which on gloo is several times faster than its own."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(group.size(), -1), 0, out=output_tensor.view(-1))
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
        return None


def _with_fast_scatter(net: nn.Module) -> nn.Module:
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(_ScatterByExchange())
    return net


def fsdp2_fast(size: str, rank: int) -> Step:
    """FSDP2 with the faster reduce-scatter, so that what is gloo's is told from what is FSDP's."""
    net = _with_fast_scatter(_sharded(size))
    return _module_step(net, net.parameters(), _rows(size, rank))


def fsdp2_fast_compiled(size: str, rank: int) -> Step:
    """The same under torch.compile."""
    net = _with_fast_scatter(_sharded(size))
    return _module_step(torch.compile(net), net.parameters(), _rows(size, rank))


def _simple_fsdp(size: str, rank: int, compiled: bool) -> Step:
    """Parameters as sharded DTensors that are gathered for use, layer by layer: the way of torchtitan's SimpleFSDP."""
    mesh = init_device_mesh("cpu", (RANKS,))
    params = _placed(torch_params(size), mesh, Shard(0))
    leaves, heads, data = _leaves(params), SIZES[size].H, _rows(size, rank)

    def whole(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {name: whole(value) for name, value in tree.items()}
        return tree.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])

    def forward(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outer = whole({name: value for name, value in params.items() if name != "blocks"})
        x = embed(outer, tokens)
        for layer in params["blocks"]:
            x = block(whole(layer), x, heads)
        return head(outer, x, targets)

    return _module_step(torch.compile(forward) if compiled else forward, leaves, data)


def simple_fsdp(size: str, rank: int) -> Step:
    """Sharded DTensors gathered for use, eager."""
    return _simple_fsdp(size, rank, compiled=False)


def simple_fsdp_compiled(size: str, rank: int) -> Step:
    """The same under torch.compile, which makes one graph of it."""
    return _simple_fsdp(size, rank, compiled=True)


def dtensor(size: str, rank: int) -> Step:
    """Replicated DTensors and a batch in shards, operator by operator: autograd and AdamW over DTensor's dispatch.

    DTensor has no rule for attention's CPU kernel; rows of the batch are independent there, so it runs on each rank's.
    """
    mesh = init_device_mesh("cpu", (RANKS,))
    params = _placed(torch_params(size), mesh, Replicate())
    leaves = _leaves(params)
    tokens, targets = (distribute_tensor(value, mesh, [Shard(0)]) for value in torch_batch(size))
    local_attend = local_map(attend, out_placements=[Shard(0)], in_placements=([Shard(0)],) * 3)
    heads, optimizer = SIZES[size].H, _adamw(leaves)

    def step() -> torch.Tensor:
        loss = loss_fn(params, tokens, targets, heads, local_attend)
        loss.backward()
        for leaf in leaves:
            leaf.grad = leaf.grad.redistribute(placements=[Replicate()])  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().full_tensor()

    return step


def _placed(tree: Any, mesh: DeviceMesh, placement: Placement) -> Any:
    if isinstance(tree, dict):
        return {name: _placed(value, mesh, placement) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_placed(value, mesh, placement) for value in tree]
    return nn.Parameter(distribute_tensor(tree, mesh, [placement]))


def _leaves(tree: Any) -> list[DTensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]  # type: ignore[list-item]
    values = tree.values() if isinstance(tree, dict) else tree
    return [leaf for value in values for leaf in _leaves(value)]
