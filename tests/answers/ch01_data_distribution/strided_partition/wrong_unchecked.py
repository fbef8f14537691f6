"""refuses_impossible_input: a rank outside the world gets samples"""

import numpy as np


def strided(n, world_size, rank):
    return np.arange(rank, n, world_size, dtype=np.int64)
