"""A server per shard: every rank receives the gradients of its own shard of the parameters, updates it, and sends it.

The sums are those of `minidist.simple.consistency.central_step`, but every rank's link carries the same bytes, those of
a reduce-scatter and an all-gather. With the shard's optimizer states this is ZeRO stage 1 (chapter 05).
"""

import torch
from torch import Tensor

from minidist.comm import Group, P2POp, batch_send_recv
from minidist.simple.consistency import Update


def sharded_step(parameters: Tensor, gradient: Tensor, update: Update, group: Group) -> None:
    """Collective: sum each shard of the gradients on its server, update it there, and send it to all ranks.

    parameters, gradient: flat tensors; equal parameters on all ranks. Rank r is the server of shard r: both tensors are
    divided into consecutive shards, of which the first `len(parameters) % group.size` have one element more than the
    others. gradient: w_i * grad L of this rank. update: called once on every rank, with its shards of the parameters
    and of the summed gradient.
    """
    shards, parts = parameters.tensor_split(group.size), gradient.tensor_split(group.size)
    mine, others = group.rank, [rank for rank in range(group.size) if rank != group.rank]
    arriving = [torch.empty_like(parts[mine]) for _ in others]
    receives = [P2POp("recv", tensor, rank) for tensor, rank in zip(arriving, others, strict=True)]
    batch_send_recv([P2POp("send", parts[rank], rank) for rank in others] + receives, group)
    update(shards[mine], sum(arriving, start=parts[mine].clone()))
    sends = [P2POp("send", shards[mine], rank) for rank in others]
    batch_send_recv(sends + [P2POp("recv", shards[rank], rank) for rank in others], group)
