"""Which ranks hang: the solution.

A rank hangs if the operation it waits for can no longer be matched. You do not need a clock to see that: write down
which operation each rank waits in. If every rank that could match the operation has returned or hangs itself, the
rank hangs. minidist detects a deadlock in this way, from the status of all ranks, in a fraction of a second; torch's
timeout would end it after thirty minutes.

In the ring, even ranks send first and odd ranks receive first, so every send finds its receiver. If all ranks sent
first, all would block. At the end of the chain rank 3 waits for rank 2, which is blocked itself.

Usual wrong answers:
* names ranks that never call the barrier
* changes the scenario until the answer fits
* says that every rank hangs in every scenario
* takes a blocking send to hang even if the receiver has posted its receive
* omits the last rank, which sends nothing
* takes the first send to return without a receive
* names only the neighbour of the rank that returned
* says that the other ranks wait for rank 0
* names the rank that skipped the operation, which has returned
* leaves one scenario unanswered
* says that no rank ever hangs
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
