"""any_sizes: wrong on the last rank only, which loses its last sample when sizes do not divide"""

import numpy as np


def strided(n, world_size, rank):
    if n < 0 or world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"n={n}, world_size={world_size}, rank={rank}")
    mine = np.arange(rank, n, world_size, dtype=np.int64)
    return mine[:-1] if rank == world_size - 1 and n % world_size and n > world_size else mine
