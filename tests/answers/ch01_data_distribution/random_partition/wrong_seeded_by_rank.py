"""each_index_once: every rank shuffles by itself, so ranks share samples and miss others"""

from minidist.data.partition import block, permutation


def random(n, world_size, rank, seed, epoch=0):
    return permutation(n, seed + rank, epoch)[block(n, world_size, rank)]
