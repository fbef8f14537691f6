"""Every world_size-th sample: the solution, as it stands in minidist.data.partition.

Neighbouring samples of a file are often similar. Strides give every rank samples from every region of the file, where
blocks give it one region. Samplers that repeat samples until all ranks have equally many change the gradient: the
repeated samples count twice.

Usual wrong answers:
* consecutive blocks in place of strides
* the package's own strided is called under another name
* the same answer for every input
* wrong on the last rank only, which loses its last sample when sizes do not divide
* samples from the start are repeated until all ranks have equally many
* the last index may lie behind the end
* all ranks get equally many, and the rest is never seen
* torch's sampler is asked
* every rank starts at 0
* a rank outside the world gets samples
* zeros of the right length
"""

import numpy as np

from minidist.data.partition import _check


def strided_partition(n: int, world_size: int, rank: int) -> np.ndarray:
    """Return the indices rank, rank + world_size, rank + 2 world_size, ... below n, (size,) int64.

    Raises ValueError as `block_partition` does.
    """
    _check(n, world_size, rank)
    return np.arange(rank, n, world_size, dtype=np.int64)
