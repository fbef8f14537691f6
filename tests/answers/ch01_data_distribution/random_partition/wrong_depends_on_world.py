"""seed_and_epoch_decide: the order depends on the number of ranks"""

from minidist.data.partition import block, permutation


def random(n, world_size, rank, seed, epoch=0):
    return permutation(n, seed + world_size, epoch)[block(n, world_size, rank)]
