"""Which gradients share a bucket. Needs no torch: the estimate reads it too."""

from collections.abc import Mapping

MIB = 2**20

# Every message costs about a millisecond whatever its size, so buckets are large; but the network should have something
# to do early, and a small model would fill one bucket only at the very end of backward.
FIRST_BYTES = MIB


def assign(sizes: Mapping[str, int], limit: int, first: int | None = None) -> list[list[str]]:
    """Cut parameter names into buckets of consecutive names, in the order of `sizes`, each of at most `limit` bytes.

    A bucket takes the next name as long as it fits. A parameter larger than the limit has a bucket of its own.

    sizes: name to bytes. first: limit of the first bucket, if it is to be smaller.
    """
    buckets: list[list[str]] = []
    filled = room = 0
    for name, size in sizes.items():
        if not buckets or filled + size > room:
            room = limit if buckets or first is None else min(first, limit)
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += size
    return buckets
