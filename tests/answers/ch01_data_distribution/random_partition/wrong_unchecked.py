"""refuses_impossible_input: a rank that is not there gets samples all the same"""

import numpy as np


def random(n, world_size, rank, seed, epoch=0):
    size, rest = divmod(n, world_size)
    start = rank * size + min(rank, rest)
    return np.random.default_rng([seed, epoch]).permutation(n)[start : start + size + (rank < rest)]
