"""Blocks of a shared random permutation: the solution, as it stands in minidist.data.partition.

No communication is needed: equal seeds give equal permutations on all ranks, and the blocks are disjoint. The
permutation depends on (seed, epoch) alone. A generator that advances during the run would give another order after a
restart, and numpy's global generator advances whenever any code draws from it.

Usual wrong answers:
* the package's own random is called
* the same answer for every input
* the order depends on the number of ranks
* every epoch has the same order
* the global generator decides, which is in another state on every rank
* the order is turned by a random amount, and neighbours stay together
* after twenty epochs the orders come again
* the last rank takes the whole rest
* the next seed's epoch 0 has the order of this one's epoch 1
* every rank shuffles by itself, so ranks share samples and miss others
* the global generator is seeded, and with it everybody who draws from it
* every rank keeps its block and shuffles inside, so no sample ever changes its rank
* the order is cut in strides, so another number of ranks gives another order
* a rank that is not there gets samples all the same
* numbers are drawn, and may be drawn twice
* zeros of the right length
"""

import numpy as np

from minidist.data.partition import block_partition, permutation


def random_partition(n: int, world_size: int, rank: int, seed: int, epoch: int = 0) -> np.ndarray:
    """Return the indices, (size,) int64, of `rank`'s block of a random permutation, the same on all ranks.

    Raises ValueError as `block_partition` does.
    """
    mine = block_partition(n, world_size, rank)
    return permutation(n, seed, epoch)[mine]
