"""Every world_size-th sample: the solution, as it stands in minidist.data.partition.

Neighbouring samples of a file are often similar. Strides give every rank samples from every region of the file, where
blocks give it one region. Samplers that repeat samples until all ranks have equally many change the gradient: the
repeated samples count twice.

Usual wrong answers:
* returns consecutive blocks
* calls the package's function under another name
* returns one fixed answer for every input
* drops the last sample of the last rank if the sizes do not divide
* checks no arguments if there is no sample
* repeats samples from the start until all ranks have equally many
* the last index may exceed n - 1
* gives all ranks equally many samples and drops the rest
* uses torch's sampler
* every rank starts at 0
* accepts a rank outside the world
* zeros of the right length
"""

import numpy as np

from minidist.data.partition import _check


def strided_partition(n: int, world_size: int, rank: int) -> np.ndarray:
    """Return the indices rank, rank + world_size, rank + 2 world_size, ... below n, (size,) int64.

    Raises ValueError for n < 0, world_size < 1 or a rank outside 0..world_size-1.
    """
    _check(n, world_size, rank)
    return np.arange(rank, n, world_size, dtype=np.int64)
