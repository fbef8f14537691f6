"""Which ranks wait for ever.

Which ranks wait for ever? Each function below is started on as many ranks as RANKS says, with the rank as its
argument. Fill in ANSWERS: the set of the ranks that never return; set() when all of them do.

Nothing here knows the answers. The check runs the functions and looks where the ranks stand, so it does not help to
change them.

Check it with: python -m exercises check which_rank_hangs

Stub 3cf91c85.
"""

import torch
import torch.distributed as dist

RANKS = {
    "one_skips_the_sum": 3,
    "both_send_first": 2,
    "barrier_on_rank_0": 3,
    "neighbours_take_turns": 4,
    "head_of_the_chain_leaves": 4,
}
ANSWERS = {
    "one_skips_the_sum": None,
    "both_send_first": None,
    "barrier_on_rank_0": None,
    "neighbours_take_turns": None,
    "head_of_the_chain_leaves": None,
}


def one_skips_the_sum(rank):
    """The loss of rank 1 is no number, and it leaves the gradient of this step out."""
    gradient = torch.ones(10)
    if rank != 1:
        dist.all_reduce(gradient)


def both_send_first(rank):
    """Two ranks exchange ten numbers."""
    mine, theirs = torch.full((10,), float(rank)), torch.empty(10)
    dist.send(mine, 1 - rank)
    dist.recv(theirs, 1 - rank)


def barrier_on_rank_0(rank):
    """Only rank 0 writes the checkpoint, and waits until everybody is there."""
    total = torch.ones(1)
    dist.all_reduce(total)
    if rank == 0:
        dist.barrier()


def neighbours_take_turns(rank):
    """Everybody sends to the right and receives from the left; odd ranks do it the other way round."""
    left, right = (rank - 1) % 4, (rank + 1) % 4
    mine, theirs = torch.full((10,), float(rank)), torch.empty(10)
    if rank % 2 == 0:
        dist.send(mine, right)
        dist.recv(theirs, left)
    else:
        dist.recv(theirs, left)
        dist.send(mine, right)


def head_of_the_chain_leaves(rank):
    """Numbers go down a chain of ranks, but the first rank has ended its training early."""
    numbers = torch.zeros(10)
    if rank == 0:
        return
    dist.recv(numbers, rank - 1)
    if rank < 3:
        dist.send(numbers, rank + 1)
