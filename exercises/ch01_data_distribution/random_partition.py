"""Blocks of a shared random permutation.

Write the missing lines of random_partition; its docstring specifies the result.
You may call: block_partition, permutation, numpy.random.default_rng.
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
