"""Reduce-scatter and all-gather in one round: every rank gives every other its part. The door's own over gloo.

gloo has no reduce-scatter: torch makes one of an all-reduce over a copy, which sends each byte twice. Here a rank sends
each part once, to the rank that it belongs to, and all transfers are on their way at once, so they need nobody to start
the next round. What arrives is added up in rank order when it is waited for. Bytes are those of a ring; messages are
`size - 1` of each rank at once, which is meant for the few ranks that talk over gloo.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.comm.group import Group
from minidist.comm.handles import Handle, launch

COMBINE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}
_TAG = 1 << 20  # of these transfers, so that they never meet those of `send` and `recv`


def suits(tensor: Tensor, group: Group) -> bool:
    """Whether the parts of a tensor go directly, rather than by the backend's own collective."""
    return group.over_gloo and tensor.device.type == "cpu" and tensor.numel() > 0


def reduce_scatter(output: Tensor, input: Tensor, group: Group, op: str, detail: str, async_op: bool) -> Handle | None:
    """The door's, for tensors that it has checked. output may be this rank's part of the input."""
    parts = input.view(-1).split(output.numel())
    arrived = {rank: torch.empty_like(parts[rank]) for rank in range(group.size) if rank != group.rank}

    def start() -> list[dist.Work]:
        return _swap(group, leaving={rank: parts[rank] for rank in arrived}, arriving=arrived)

    def reduce() -> None:
        total = parts[0] if group.rank == 0 else arrived[0]
        room = arrived[min(arrived)]  # the output may be a part that is still to be read
        for rank in range(1, group.size):
            into = output.view(-1) if rank == group.size - 1 else room
            total = COMBINE[op](total, parts[rank] if rank == group.rank else arrived[rank], out=into)

    owned = [output, input, *arrived.values()]
    return launch(
        group, "reduce_scatter", input, start, owned, detail=detail, async_op=async_op, then=reduce, algorithm="direct"
    )


def all_gather(output: Tensor, input: Tensor, group: Group, async_op: bool) -> Handle | None:
    """The door's, for tensors that it has checked. input may be this rank's part of the output."""
    parts, mine = output.view(-1).split(input.numel()), input.view(-1)
    others = [rank for rank in range(group.size) if rank != group.rank]

    def start() -> list[dist.Work]:
        works = _swap(group, leaving=dict.fromkeys(others, mine), arriving={rank: parts[rank] for rank in others})
        if parts[group.rank].data_ptr() != mine.data_ptr():
            parts[group.rank].copy_(mine)
        return works

    return launch(group, "all_gather", output, start, [output, input], async_op=async_op, algorithm="direct")


def _swap(group: Group, leaving: Mapping[int, Tensor], arriving: Mapping[int, Tensor]) -> list[dist.Work]:
    """Start all transfers, tensors by the group rank at their other end, beginning with the next rank."""
    ways, works = {"group": group.process_group, "tag": _TAG}, []
    for peer in sorted(leaving, key=lambda rank: (rank - group.rank) % group.size):
        works.append(dist.irecv(arriving[peer], src=group.ranks[peer], **ways))
        works.append(dist.isend(leaving[peer], dst=group.ranks[peer], **ways))
    return works
