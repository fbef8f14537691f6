"""largest_remainder: the package's own sizes and weighted are called"""

from minidist.data import partition


def sizes(n, weights):
    return partition.sizes(n, weights)


def weighted(n, weights, rank):
    return partition.weighted(n, weights, rank)
