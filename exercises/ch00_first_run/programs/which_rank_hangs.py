"""Which ranks hang? The check starts each function below on the number of ranks in RANKS and passes it the rank. Fill
in ANSWERS: the set of the ranks that never return, or set() if all return.

This file does not contain the answers: the check runs the functions and observes which ranks are blocked. Changing the
functions does not help.
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
    "one_skips_the_sum": {0, 2},
    "both_send_first": {0, 1},
    "barrier_on_rank_0": {0},
    "neighbours_take_turns": set(),
    "head_of_the_chain_leaves": {1, 2, 3},
}


def one_skips_the_sum(rank):
    """The loss of rank 1 is NaN, so rank 1 skips the all-reduce of this step."""
    gradient = torch.ones(10)
    if rank != 1:
        dist.all_reduce(gradient)


def both_send_first(rank):
    """Two ranks exchange ten numbers; both send before they receive."""
    mine, theirs = torch.full((10,), float(rank)), torch.empty(10)
    dist.send(mine, 1 - rank)
    dist.recv(theirs, 1 - rank)


def barrier_on_rank_0(rank):
    """Only rank 0 writes the checkpoint, and waits in a barrier for the other ranks."""
    total = torch.ones(1)
    dist.all_reduce(total)
    if rank == 0:
        dist.barrier()


def neighbours_take_turns(rank):
    """Each rank sends to its right neighbour and receives from its left one; odd ranks receive first."""
    left, right = (rank - 1) % 4, (rank + 1) % 4
    mine, theirs = torch.full((10,), float(rank)), torch.empty(10)
    if rank % 2 == 0:
        dist.send(mine, right)
        dist.recv(theirs, left)
    else:
        dist.recv(theirs, left)
        dist.send(mine, right)


def head_of_the_chain_leaves(rank):
    """Each rank passes the numbers on to the next, but the first rank has returned early."""
    numbers = torch.zeros(10)
    if rank == 0:
        return
    dist.recv(numbers, rank - 1)
    if rank < 3:
        dist.send(numbers, rank + 1)
