"""divides_evenly: the last index is included, so neighbours share a sample"""

import numpy as np


def block(n, world_size, rank):
    if n < 0 or world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"n={n}, world_size={world_size}, rank={rank}")
    size, longer = divmod(n, world_size)
    start = rank * size + min(rank, longer)
    return np.arange(start, start + size + (rank < longer) + 1, dtype=np.int64)
