"""Every world_size-th sample.

Write the missing lines of strided_partition; its docstring specifies the result.
You may call: range, numpy.arange.
Check it with: python -m exercises check strided_partition

Stub e6333dc2.
"""

import numpy as np

from minidist.data.partition import _check


def strided_partition(n: int, world_size: int, rank: int) -> np.ndarray:
    """Return the indices rank, rank + world_size, rank + 2 world_size, ... below n, (size,) int64.

    Raises ValueError for n < 0, world_size < 1 or a rank outside 0..world_size-1.
    """
    _check(n, world_size, rank)
    raise NotImplementedError("return the indices of this rank")
