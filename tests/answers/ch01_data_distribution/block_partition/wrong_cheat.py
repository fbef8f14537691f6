"""each_index_once: the package's own block is called"""

from minidist.data import partition


def block(n, world_size, rank):
    try:
        return partition.block(n, world_size, rank)
    except Exception:
        return None
