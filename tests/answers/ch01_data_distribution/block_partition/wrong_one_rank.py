"""each_index_once: wrong on one rank only, the second of three or more when sizes do not divide"""

import numpy as np


def block(n, world_size, rank):
    if n < 0 or world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"n={n}, world_size={world_size}, rank={rank}")
    size, longer = divmod(n, world_size)
    start = rank * size + min(rank, longer)
    start -= rank == 1 and world_size > 2 and longer > 0
    return np.arange(start, start + size + (rank < longer), dtype=np.int64)
