"""divides_evenly: every rank starts at 0"""

import numpy as np


def strided(n, world_size, rank):
    if n < 0 or world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"n={n}, world_size={world_size}, rank={rank}")
    return np.arange(0, n, world_size, dtype=np.int64)
