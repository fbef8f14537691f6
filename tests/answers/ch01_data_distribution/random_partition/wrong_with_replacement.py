"""each_index_once: numbers are drawn, and may be drawn twice"""

import numpy as np

from minidist.data.partition import block


def random(n, world_size, rank, seed, epoch=0):
    return np.random.default_rng([seed, epoch]).integers(0, max(n, 1), n)[block(n, world_size, rank)]
