"""Every world_size-th sample.

Give rank r of world_size the samples r, r + world_size, r + 2 world_size and so on, below n.

Returns an int64 array, (size,), in increasing order.
Example: 7 samples on 3 ranks are [0, 3, 6], [1, 4] and [2, 5]; 2 samples on 3 ranks are [0], [1] and [].

Checked: that no sample is dropped or repeated, whether or not world_size divides n; empty results; that arguments
that make no sense raise ValueError, which the given first line does.

You may call:
    numpy.arange(start, stop, step, dtype=numpy.int64)

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
