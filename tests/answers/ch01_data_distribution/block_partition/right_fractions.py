"""Cuts at the fractions rounded up, from the end of the samples."""

import numpy as np


def block(n, world_size, rank):
    if n < 0 or world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"n={n}, world_size={world_size}, rank={rank}")
    first = -(-n * rank // world_size) if n % world_size == 0 else sum(_size(n, world_size, r) for r in range(rank))
    return np.arange(first, first + _size(n, world_size, rank), dtype=np.int64)


def _size(n, world_size, rank):
    return (n + world_size - 1 - rank) // world_size
