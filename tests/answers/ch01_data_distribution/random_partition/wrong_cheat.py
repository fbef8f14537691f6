"""each_index_once: the package's own random is called"""

import minidist.data.partition as ours


def random(n, world_size, rank, seed, epoch=0):
    return ours.random(n, world_size, rank, seed, epoch)
