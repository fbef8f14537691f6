"""Assignment of gradients to buckets. Needs no torch: the estimate uses it too."""

from collections.abc import Mapping

MIB = 2**20

# Every message has a latency of about a millisecond, so buckets are large. The first is small, so that communication
# starts early in backward, even for a model that would fill only one bucket.
FIRST_BYTES = MIB


def assign_buckets(sizes: Mapping[str, int], limit: int, first: int | None = None) -> list[list[str]]:
    """Assign parameters to gradient buckets; return the parameter names of each bucket.

    A bucket takes consecutive names of `sizes` as long as they fit; a parameter larger than the limit has a bucket of
    its own. sizes: bytes of each gradient, by parameter name, in the order in which backward computes the gradients.
    limit: maximum bytes of a bucket. first: maximum bytes of the first bucket if smaller than `limit`; None means
    `limit`.
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
