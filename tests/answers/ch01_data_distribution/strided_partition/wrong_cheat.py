"""any_sizes: the package's own strided is called under another name"""

from minidist.data.partition import strided as ours


def strided(n, world_size, rank):
    return ours(n, world_size, rank)
