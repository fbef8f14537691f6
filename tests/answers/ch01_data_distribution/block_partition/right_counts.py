"""Deals the samples out one by one and counts them."""

import numpy as np


def block(n, world_size, rank):
    if n < 0 or world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"n={n}, world_size={world_size}, rank={rank}")
    counts = np.bincount(np.arange(n) % world_size, minlength=world_size)
    start = int(counts[:rank].sum())
    return np.arange(start, start + int(counts[rank]), dtype=np.int64)
