"""A central server, and a server per shard: the solution, as it stands in minidist.tools.consistency.sharded and
minidist.simple.consistency.

A server's link carries the gradients of all workers and the parameters for all of them: n - 1 times as many bytes as
a worker's link. The time of a step grows with the number of ranks. With a shard per rank every link carries (n - 1) /
n of the gradients and of the parameters, in each direction, whatever n is. This is a reduce-scatter and an all-
gather, and therefore the same bytes as an all-reduce by a ring (chapter 03).

Only a server needs optimizer states. With one server the other ranks save them; with a server per shard each rank has
the states of its shard, which is ZeRO stage 1 (chapter 05). The numbers are those of synchronous data parallelism in
both cases: all gradients belong to the same parameters, and one update uses their sum.

Usual wrong answers:
* one server for all shards: right parameters, but rank 0 updates everything
* all-reduces a number to wait for all updates, although the messages wait by themselves
* the server sends its parameters first, while the workers send their gradients: both wait for ever
* the package's own
* cuts by chunk, whose last shards are shorter: other ranks serve the elements, and sometimes a shard is missing
* the same parameters in every step
* does not call update if there are no elements
* sends the summed gradient back, and every rank updates: each needs the optimizer's states
* overwrites the sum by each gradient that arrives
* divides by the number of ranks, although the weights are in the gradients
* sums the gradients of the workers without that of the server
* sums the shards that arrive without its own
* receives the shards into copies, which are dropped
* shards of numel // size elements: nobody serves the rest
* sends the parameters before it has updated them: the workers are one step behind
* the server is always rank 0
* each rank keeps its updated shard: the other shards are those of the last step
* adds the gradients of the others to the server's own gradient, which then is another one
* updates once for each gradient: momentum decays several times per step
* sends its whole gradient to every server, which then uses its own shard of it
* zeros on all ranks
"""

import torch
from torch import Tensor

from minidist.comm import Group, P2POp, batch_send_recv, recv, send
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


def central_step(parameters: Tensor, gradient: Tensor, update: Update, group: Group, server: int) -> None:
    """Collective: sum all gradients on the server, update the parameters there, and send them to all ranks.

    gradient: this rank's, already times its weight, (n,) as `parameters`. server: a group rank, the only one with
    optimizer states; update(parameters, summed gradient) is called there. `parameters` is overwritten on all ranks.
    """
    if group.rank != server:
        send(gradient, server, group)
        recv(parameters, server, group)
        return
    workers = [rank for rank in range(group.size) if rank != server]
    total, received = gradient.clone(), torch.empty_like(gradient)
    for rank in workers:
        recv(received, rank, group)
        total += received
    update(parameters, total)
    for rank in workers:
        send(parameters, rank, group)
