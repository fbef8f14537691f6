"""Which ranks wait for ever: the solution.

A rank hangs when what it waits for can no longer come. To see it, no clock is needed: write down what every rank
waits for. If everybody whom a rank needs has returned, or is stuck as well, it is stuck. That is how the board of
minidist proves a deadlock in a fraction of a second, where a time-out would have kept thirty minutes of silence.

In the ring, ranks that begin with different halves meet at once; had all of them sent first, all would wait. At the
end of the chain rank 3 waits for rank 2, which has done nothing wrong either.

Usual wrong answers:
* ranks that never come to the barrier are said to wait in it
* the scenario is changed until the answer fits
* every rank waits for ever, whatever it does
* blocking sends are thought to wait for ever, also when somebody receives
* the last rank, which sends nothing, is forgotten
* the first send is thought to go through
* only the rank next to the one that left
* the others are said to wait for rank 0
* the rank that left the operation out is said to wait, and it has long returned
* one is left unanswered
* no rank ever waits
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
