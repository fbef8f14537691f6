"""Blocks of a shared random permutation.

Give each rank a block of one shuffled order of all samples. All ranks must shuffle in the same way without
communication, and differently in each epoch.

seed, epoch: integers from 0 to 2**32 - 1. Returns an int64 array, (size,). Sizes are those of block_partition. For
given n, the order depends on seed and epoch only: not on the number of ranks, on earlier calls, or on random numbers
drawn elsewhere. Different pairs of seed and epoch give different orders, also (1, 1) and (2, 0).
Example: if the order of 5 samples is 3, 0, 4, 1, 2, then rank 0 of 2 has [3, 0, 4] and rank 1 has [1, 2].

Checked: that every sample belongs to exactly one rank, also where ranks have drawn different random numbers before;
that two calls agree, and different numbers of ranks; that epochs and seeds differ and shuffle well; that numpy's global
generator keeps its state; that n, world_size or rank that make no sense raise ValueError.

You may call:
    block_partition(n, world_size, rank)   positions of this rank's block in 0 .. n-1, (size,); checks its arguments
    permutation(n, seed, epoch)   a permutation of 0 .. n-1, (n,) int64, that depends on its arguments only
    numpy.random.default_rng(seed)   a generator of its own

Check it with: python -m exercises check random_partition

Stub 893090bf.
"""

import numpy as np

from minidist.data.partition import block_partition, permutation


def random_partition(n: int, world_size: int, rank: int, seed: int, epoch: int = 0) -> np.ndarray:
    """Return `rank`'s block, (size,) int64, of a permutation of 0..n-1 that depends on seed and epoch only.

    Block sizes differ by at most one. Raises ValueError for n < 0, world_size < 1 or a rank outside 0..world_size-1.
    """
    raise NotImplementedError("return this rank's part of the random order of this epoch")
