"""sizes_differ_by_at_most_one: the last rank takes the whole rest, and all others wait for it"""

import numpy as np


def block(n, world_size, rank):
    if n < 0 or world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"n={n}, world_size={world_size}, rank={rank}")
    size = n // world_size
    stop = n if rank == world_size - 1 else rank * size + size
    return np.arange(rank * size, stop, dtype=np.int64)
