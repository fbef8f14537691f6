"""more_ranks_than_samples (raised): a rank without samples fails instead of having none"""

import numpy as np


def block(n, world_size, rank):
    if n < 0 or world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"n={n}, world_size={world_size}, rank={rank}")
    size, longer = divmod(n, world_size)
    start = rank * size + min(rank, longer)
    if n and size + (rank < longer) == 0:
        raise ValueError("nothing for this rank")
    return np.arange(start, start + size + (rank < longer), dtype=np.int64)
