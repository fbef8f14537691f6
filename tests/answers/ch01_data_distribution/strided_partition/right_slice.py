"""Cuts every world_size-th out of all indices."""

import numpy as np


def strided(n, world_size, rank):
    if n < 0 or world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"n={n}, world_size={world_size}, rank={rank}")
    return np.arange(n, dtype=np.int64)[rank::world_size]
