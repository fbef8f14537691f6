"""Walks over the ranks before this one and keeps where the next block starts."""

import numpy as np


def block(n, world_size, rank):
    if n < 0 or world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"n={n}, world_size={world_size}, rank={rank}")
    start = 0
    for earlier in range(rank):
        start += n // world_size + int(earlier < n % world_size)
    return np.array(range(start, start + n // world_size + int(rank < n % world_size)), dtype=np.int64)
