"""Assign gradients to buckets: the solution, as it stands in minidist.simple.data_parallel.

Every all-reduce has a fixed cost, some microseconds per round on a fast network and about a millisecond between
processes over gloo, so many small gradients should share one. But a bucket can be launched only when its last
gradient is ready: a single bucket for everything starts when backward is over, when no computation is left to overlap
with. Hence the limit. The buckets keep the order of the names, which is the order in which backward finishes the
parameters.

Usual wrong answers:
* ends a bucket after it has exceeded the limit
* puts a parameter into any bucket with room, so the order is lost
* calls the package's function
* puts everything into one bucket, whatever the limit
* a first parameter above the limit leaves an empty bucket before it
* starts a new bucket for a parameter that fits exactly
* does not reset the size at a new bucket
* one bucket per parameter
* calls torch's function
* drops a parameter above the limit
* returns no bucket
"""

from collections.abc import Mapping


def assign_buckets(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Assign gradients to buckets; return the names in each bucket, in the order of `sizes`. No bucket is empty.

    A bucket takes the next gradient if it fits; one larger than `limit` has a bucket of its own. sizes: bytes of each
    gradient by name, in the order in which backward computes them. limit: maximum bytes of a bucket.
    """
    buckets: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not buckets or filled + size > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += size
    return buckets
