"""Takes the order from its end."""

from minidist.data.partition import block, permutation


def random(n, world_size, rank, seed, epoch=0):
    return permutation(n, seed, epoch)[::-1][block(n, world_size, rank)].copy()
