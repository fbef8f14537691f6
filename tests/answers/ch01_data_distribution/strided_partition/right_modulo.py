"""Keeps the indices whose remainder is the rank."""

import numpy as np


def strided(n, world_size, rank):
    if n < 0 or world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"n={n}, world_size={world_size}, rank={rank}")
    return np.array([i for i in range(n) if i % world_size == rank], dtype=np.int64)
