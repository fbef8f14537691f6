"""Collectives and point-to-point transfers: every byte between ranks passes through one of these functions.

Each takes a `Group` and works in place. With `async_op=True` it returns a `Handle` at once, which owns the tensors
until `wait()`: do not read or write them before. On CUDA `wait()` orders streams and does not block the host. Peers and
roots are ranks *in the group*. All its ranks must call the functions marked "Collective", in the same order.

In a group of one rank a collective does its local part, and the traffic meter (`meter`) counts nothing; a transfer,
which needs another rank, raises ValueError.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.comm import direct_exchange
from minidist.comm.group import Group
from minidist.comm.handles import (
    CommError,
    Handle,
    completed_handle,
    failure_message,
    launch,
    report_launch,
    wait_unless_async,
)

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}

# torch 2.13 renamed these two; the old names warn from then on.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# In the names of operations "sum", the default reduction, is left out: op.removeprefix("sum").


def all_reduce(tensor: Tensor, group: Group, op: str = "sum", async_op: bool = False) -> Handle | None:
    """Collective: all-reduce `tensor` (any shape) in place, elementwise. op: "sum", "max", "min" or "product"."""
    if group.size == 1:
        return completed_handle(group, async_op)
    start = partial(dist.all_reduce, tensor, op=REDUCE_OPS[op], group=group.process_group, async_op=True)
    return launch(group, "all_reduce", tensor, start, [tensor], detail=op.removeprefix("sum"), async_op=async_op)


def reduce_scatter(
    output: Tensor, input: Tensor, group: Group, op: str = "sum", async_op: bool = False
) -> Handle | None:
    """Collective: reduce `input` (size * n, ...) over the ranks; `output` (n, ...) gets shard `group.rank` of it."""
    check_shard_sizes("reduce_scatter", full=input, shard=output, group=group)
    if group.size == 1:
        output.copy_(input)
        return completed_handle(group, async_op)
    if direct_exchange.is_supported(input, group):
        return direct_exchange.reduce_scatter(output, input, group, op, async_op)
    start = partial(_reduce_scatter, output, input, op=REDUCE_OPS[op], group=group.process_group, async_op=True)
    return launch(
        group, "reduce_scatter", input, start, [output, input], detail=op.removeprefix("sum"), async_op=async_op
    )


def all_gather(output: Tensor, input: Tensor, group: Group, async_op: bool = False) -> Handle | None:
    """Collective: concatenate the `input` (n, ...) of all ranks, in rank order, into `output` (size * n, ...)."""
    check_shard_sizes("all_gather", full=output, shard=input, group=group)
    if group.size == 1:
        output.copy_(input)
        return completed_handle(group, async_op)
    if direct_exchange.is_supported(input, group):
        return direct_exchange.all_gather(output, input, group, async_op)
    start = partial(_all_gather, output, input, group=group.process_group, async_op=True)
    return launch(group, "all_gather", output, start, [output, input], async_op=async_op)


def broadcast(tensor: Tensor, src: int, group: Group, async_op: bool = False) -> Handle | None:
    """Collective: overwrite `tensor` with the tensor of group rank `src` (a rank's number within `group`)."""
    if group.size == 1:
        return completed_handle(group, async_op)
    start = partial(dist.broadcast, tensor, src=group.ranks[src], group=group.process_group, async_op=True)
    detail = f"root {group.ranks[src]}"
    return launch(group, "broadcast", tensor, start, [tensor], detail=detail, root=src, async_op=async_op)


def all_to_all(
    output: Tensor,
    input: Tensor,
    group: Group,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    async_op: bool = False,
) -> Handle | None:
    """Collective: send part i of `input` to rank i, and receive part i of `output` from rank i.

    The parts are consecutive along dimension 0. output_splits, input_splits: the length of each rank's part of `output`
    and of `input` along dimension 0; None: equal parts.
    """
    if group.size == 1:
        output.copy_(input)
        return completed_handle(group, async_op)
    width = input[0].numel() if input.shape[0] else 0
    splits = None if input_splits is None else [length * width for length in input_splits]
    lengths = [None if given is None else list(given) for given in (output_splits, input_splits)]
    start = partial(dist.all_to_all_single, output, input, *lengths, group=group.process_group, async_op=True)
    return launch(group, "all_to_all", input, start, [output, input], splits=splits, async_op=async_op)


def send(tensor: Tensor, dst: int, group: Group, tag: int = 0, async_op: bool = False) -> Handle | None:
    """Send `tensor` to group rank `dst`, which must `recv` a tensor of this shape and dtype with the same tag."""
    _check_peer("send", dst, group)
    start = partial(dist.isend, tensor, dst=group.ranks[dst], group=group.process_group, tag=tag)
    channel = group.transfer_channel("send", dst, tag)
    return launch(group, "send", tensor, start, [tensor], channel=channel, async_op=async_op)


def recv(tensor: Tensor, src: int, group: Group, tag: int = 0, async_op: bool = False) -> Handle | None:
    """Overwrite `tensor` with the tensor that group rank `src` sends to this rank with the same tag."""
    _check_peer("recv", src, group)
    start = partial(dist.irecv, tensor, src=group.ranks[src], group=group.process_group, tag=tag)
    channel = group.transfer_channel("recv", src, tag)
    return launch(group, "recv", tensor, start, [tensor], channel=channel, async_op=async_op)


@dataclass(frozen=True)
class P2POp:
    """One transfer of `batch_send_recv`.

    kind: "send" or "recv". tensor: the source or destination. peer: the group rank at the other end. tag: as in `send`.
    """

    kind: str
    tensor: Tensor
    peer: int
    tag: int = 0


def batch_send_recv(transfers: Sequence[P2POp], group: Group, async_op: bool = False) -> Handle | None:
    """Launch sends and receives as one batch, which cannot deadlock whatever their order, as separate NCCL calls can.

    Return one handle for all transfers if `async_op`; otherwise wait for all of them and return None.
    """
    if not transfers:
        return completed_handle(group, async_op)
    launched = []
    number = group.meter.next_batch_id()
    for transfer in transfers:
        _check_peer(transfer.kind, transfer.peer, group)
        channel = group.transfer_channel(transfer.kind, transfer.peer, transfer.tag)
        launched.append(report_launch(group, transfer.kind, transfer.tensor, channel, batch=number))
    calls = {"send": dist.isend, "recv": dist.irecv}
    ops = [
        dist.P2POp(calls[t.kind], t.tensor, group.ranks[t.peer], group=group.process_group, tag=t.tag)
        for t in transfers
    ]
    try:
        works = dist.batch_isend_irecv(ops)
    except RuntimeError as error:
        raise CommError(failure_message(launched[0], group, error)) from error
    group.meter.on_launch([at.record for at in launched], works)
    return wait_unless_async(Handle(group, works, launched, [t.tensor for t in transfers]), async_op)


def barrier(group: Group, async_op: bool = False) -> Handle | None:
    """Collective: wait until every rank of the group has called `barrier`. With `async_op`, the handle waits."""
    if group.size == 1:
        return completed_handle(group, async_op)
    nothing = torch.empty(0, device=group.world.control_device)
    start = partial(dist.barrier, group=group.process_group, async_op=True)
    return launch(group, "barrier", nothing, start, [], async_op=async_op)


def check_shard_sizes(operation: str, full: Tensor, shard: Tensor, group: Group) -> None:
    """Raise ValueError, naming `operation`, unless `full` has `group.size` times the size of `shard`, and its dtype."""
    if full.numel() != shard.numel() * group.size or full.dtype != shard.dtype:
        raise ValueError(
            f"{operation} over {group.size} ranks: the full tensor has {full.numel()} elements of {full.dtype}, "
            f"the shard {shard.numel()} of {shard.dtype}; the full tensor must be {group.size} shards of one dtype"
        )


def _check_peer(name: str, peer: int, group: Group) -> None:
    """Raise ValueError unless `peer` is another rank of the group. name: the operation, for the message."""
    if not 0 <= peer < group.size or peer == group.rank:
        raise ValueError(f"{name} with peer {peer}: this is rank {group.rank} of {group.size} in {group}")
