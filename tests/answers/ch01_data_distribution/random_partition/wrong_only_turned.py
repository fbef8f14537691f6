"""neighbours_part: the order is turned by a random amount, and neighbours stay together"""

import numpy as np

from minidist.data.partition import block


def random(n, world_size, rank, seed, epoch=0):
    start = np.random.default_rng([seed, epoch]).integers(max(n, 1))
    return np.roll(np.arange(n, dtype=np.int64), start)[block(n, world_size, rank)]
