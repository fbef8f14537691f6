"""Which ranks never return? The check starts each function below with gloo on the number of ranks in RANKS and passes
it the rank. Fill in ANSWERS: the set of the ranks that never return, or set() if all return.
A rank that has returned stays connected to the others.

This file does not contain the answers: the check runs the functions and observes which ranks are blocked. Changing the
functions does not help.
"""

import torch
import torch.distributed as dist

RANKS = {
    "one_batch_more": 3,
    "everybody_sends_first": 3,
    "sent_in_one_batch": 3,
    "two_groups_two_orders": 3,
    "two_orders_waited_for_later": 3,
    "one_skips_its_node": 4,
}
ANSWERS = {
    "one_batch_more": {1},
    "everybody_sends_first": {0, 1, 2},
    "sent_in_one_batch": set(),
    "two_groups_two_orders": {0, 1, 2},
    "two_orders_waited_for_later": set(),
    "one_skips_its_node": {0, 2},
}


def one_batch_more(rank):
    """Seven batches over three ranks: rank 1 has one batch more than the others."""
    for _ in range(3 if rank == 1 else 2):
        dist.all_reduce(torch.ones(10))


def everybody_sends_first(rank):
    """One round of a ring: each rank sends to the right, then receives from the left."""
    mine, arriving = torch.ones(10), torch.empty(10)
    dist.send(mine, (rank + 1) % 3)
    dist.recv(arriving, (rank - 1) % 3)


def sent_in_one_batch(rank):
    """The same round with both transfers launched in one batch. One rank lists them in the opposite order."""
    mine, arriving = torch.ones(10), torch.empty(10)
    transfers = [
        dist.P2POp(dist.isend, mine, (rank + 1) % 3),
        dist.P2POp(dist.irecv, arriving, (rank - 1) % 3),
    ]
    if rank == 1:
        transfers.reverse()
    for work in dist.batch_isend_irecv(transfers):
        work.wait()


def two_groups_two_orders(rank):
    """Ranks 0 and 1 hold replicas of an expert and sum its gradient; all ranks sum the other gradients."""
    experts = dist.new_group([0, 1])
    if rank == 1:
        dist.all_reduce(torch.ones(10), group=experts)
    dist.all_reduce(torch.ones(10))
    if rank == 0:
        dist.all_reduce(torch.ones(10), group=experts)


def two_orders_waited_for_later(rank):
    """The same sums in the same orders, but each rank launches all of its sums before it waits for any."""
    experts = dist.new_group([0, 1])
    begun = []
    if rank == 1:
        begun.append(dist.all_reduce(torch.ones(10), group=experts, async_op=True))
    begun.append(dist.all_reduce(torch.ones(10), async_op=True))
    if rank == 0:
        begun.append(dist.all_reduce(torch.ones(10), group=experts, async_op=True))
    for work in begun:
        work.wait()


def one_skips_its_node(rank):
    """Two nodes of two ranks: a sum inside each node, then one across nodes over ranks with equal local index."""
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    places = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    gradient = torch.ones(10)
    if rank != 3:
        dist.all_reduce(gradient, group=nodes[rank // 2])
    dist.all_reduce(gradient, group=places[rank % 2])
