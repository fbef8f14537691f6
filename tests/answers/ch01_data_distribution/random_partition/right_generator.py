"""Draws from a generator of its own, seeded alike on all ranks."""

import numpy as np

from minidist.data.partition import block


def random(n, world_size, rank, seed, epoch=0):
    return np.random.default_rng([seed, epoch]).permutation(n)[block(n, world_size, rank)]
