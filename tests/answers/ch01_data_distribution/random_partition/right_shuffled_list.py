"""Shuffles a list with a generator that knows nothing but seed and epoch."""

from random import Random

import numpy as np

from minidist.data.partition import _check


def random(n, world_size, rank, seed, epoch=0):
    _check(n, world_size, rank)
    order = list(range(n))
    Random(f"{seed}, {epoch}").shuffle(order)
    size, longer = divmod(n, world_size)
    start = rank * size + min(rank, longer)
    return np.array(order[start : start + size + (rank < longer)], dtype=np.int64)
