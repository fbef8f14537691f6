"""refuses_impossible_input: a rank outside the world gets samples"""

import numpy as np


def block(n, world_size, rank):
    size, longer = divmod(n, world_size)
    start = rank * size + min(rank, longer)
    return np.arange(start, start + size + (rank < longer), dtype=np.int64)
