"""sizes_differ_by_at_most_one: the last rank takes the whole rest"""

from minidist.data.partition import permutation


def random(n, world_size, rank, seed, epoch=0):
    size = n // world_size
    stop = n if rank == world_size - 1 else (rank + 1) * size
    return permutation(n, seed, epoch)[rank * size : stop]
