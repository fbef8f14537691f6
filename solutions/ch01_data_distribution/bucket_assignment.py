"""Assign parameters to buckets: the solution, as it stands in minidist.parallel.data.assignment.

Every message has a fixed cost, about a millisecond on a slow network, so many small gradients should share one
message. But a bucket can be launched only when its last gradient is ready: a single bucket for everything starts
after backward, when no computation is left to overlap with. Hence the limit, and a smaller first bucket, so that
communication starts early. The buckets keep the order of the names, which is the order in which backward finishes the
parameters.

Usual wrong answers:
* ends a bucket after it has exceeded the limit
* puts a parameter into any bucket with room, so the order is lost
* calls the package's function
* puts everything into one bucket, whatever the limit
* a first parameter above the limit leaves an empty bucket before it
* the first bucket may exceed `limit`
* applies `first` to the second bucket, too
* applies `first` to all buckets
* ignores `first`
* treats first=0 as None
* starts a new bucket for a parameter that fits exactly
* does not reset the size at a new bucket
* one bucket per parameter
* calls torch's function
* drops a parameter above the limit
* returns no bucket
"""

from collections.abc import Mapping


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
