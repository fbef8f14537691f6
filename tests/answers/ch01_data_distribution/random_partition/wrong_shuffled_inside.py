"""seed_and_epoch_decide: every rank keeps its block and shuffles inside, so no sample ever changes its rank"""

from minidist.data.partition import block, permutation


def random(n, world_size, rank, seed, epoch=0):
    mine = block(n, world_size, rank)
    return mine[permutation(len(mine), seed, epoch)]
