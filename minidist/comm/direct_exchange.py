"""Reduce-scatter and all-gather by direct exchange, in one round: what `collectives` uses over gloo.

gloo has no reduce-scatter: torch emulates it by an all-reduce of a copy, which sends each byte twice. Here a rank sends
each shard once, directly to the rank it belongs to. All transfers are in flight at once, so no later round has to be
started, and `wait()` sums the received shards in rank order. A rank sends as many bytes as in a ring, in `size - 1`
concurrent messages, which suits the small numbers of ranks that use gloo.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.comm.group import Group
from minidist.comm.handles import Handle, launch

ELEMENTWISE_REDUCE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}
_TAG = 1 << 20  # so that these transfers never match those of `send` and `recv`


def is_supported(tensor: Tensor, group: Group) -> bool:
    """Whether direct exchange can run: `tensor` is non-empty and on the CPU, and the group's backend is gloo."""
    return group.uses_gloo and tensor.device.type == "cpu" and tensor.numel() > 0


def reduce_scatter(output: Tensor, input: Tensor, group: Group, op: str, async_op: bool) -> Handle | None:
    """Collective: reduce-scatter in which every rank sends each shard directly to the rank that reduces it.

    Arguments as for `collectives.reduce_scatter`, unchecked. `output` may be a view of a shard of `input`.
    """
    parts = input.view(-1).split(output.numel())
    arrived = {rank: torch.empty_like(parts[rank]) for rank in range(group.size) if rank != group.rank}

    def start() -> list[dist.Work]:
        return _launch(group, outgoing={rank: parts[rank] for rank in arrived}, incoming=arrived)

    def reduce() -> None:
        total = parts[0] if group.rank == 0 else arrived[0]
        scratch = arrived[min(arrived)]  # `output` may alias a shard of `input` that is still to be read
        for rank in range(1, group.size):
            into = output.view(-1) if rank == group.size - 1 else scratch
            total = ELEMENTWISE_REDUCE[op](total, parts[rank] if rank == group.rank else arrived[rank], out=into)

    owned = [output, input, *arrived.values()]
    return launch(
        group,
        "reduce_scatter",
        input,
        start,
        owned,
        detail=op.removeprefix("sum"),
        async_op=async_op,
        on_complete=reduce,
        algorithm="direct",
    )


def all_gather(output: Tensor, input: Tensor, group: Group, async_op: bool) -> Handle | None:
    """Collective: gather the `input` (n, ...) of all ranks into `output` (size * n, ...), sent directly.

    `input` may be this rank's part of `output`. Returns a handle with `async_op`, else None.
    """
    parts = output.view(-1).split(input.numel())
    shard = input.view(-1)
    others = [rank for rank in range(group.size) if rank != group.rank]

    def start() -> list[dist.Work]:
        works = _launch(group, outgoing=dict.fromkeys(others, shard), incoming={rank: parts[rank] for rank in others})
        if parts[group.rank].data_ptr() != shard.data_ptr():
            parts[group.rank].copy_(shard)
        return works

    return launch(group, "all_gather", output, start, [output, input], async_op=async_op, algorithm="direct")


def _launch(group: Group, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> list[dist.Work]:
    """Launch all sends and receives, in ring order from the next rank on; return torch's works.

    outgoing, incoming: the tensors to send and to receive into, by the peer's group rank.
    """
    options = {"group": group.process_group, "tag": _TAG}
    works = []
    for peer in sorted(outgoing, key=lambda rank: (rank - group.rank) % group.size):
        works.append(dist.irecv(incoming[peer], src=group.ranks[peer], **options))
        works.append(dist.isend(outgoing[peer], dst=group.ranks[peer], **options))
    return works
