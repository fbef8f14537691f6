"""Assignment of gradients to buckets. Needs no torch: the estimate uses it too."""

from collections.abc import Mapping

MIB = 2**20

# Every message has a latency of about a millisecond, so buckets are large. The first is small, so that communication
# starts early in backward, even for a model that would fill only one bucket.
FIRST_BYTES = MIB


def assign(sizes: Mapping[str, int], limit: int, first: int | None = None) -> list[list[str]]:
    """Cut parameter names into buckets of consecutive names, in the order of `sizes`, each of at most `limit` bytes.

    A bucket takes the next name as long as it fits. A parameter larger than the limit has a bucket of its own.

    sizes: name to bytes. first: a smaller limit for the first bucket; None: `limit`.
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
