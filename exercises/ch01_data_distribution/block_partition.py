"""Consecutive blocks.

Write the missing lines of block_partition; its docstring specifies the result.
You may call: divmod, min, max, range, numpy.arange.
Check it with: python -m exercises check block_partition

Stub aceb4eff.
"""

import numpy as np

from minidist.data.partition import _check


def block_partition(n: int, world_size: int, rank: int) -> np.ndarray:
    """Return the indices, (size,) int64, of `rank`'s block of 0..n-1; block sizes differ by at most one.

    Raises ValueError for n < 0, world_size < 1 or a rank outside 0..world_size-1.
    """
    _check(n, world_size, rank)
    raise NotImplementedError("return the indices of this rank's block")
