"""Assign parameters to buckets: the solution, as it stands in minidist.parallel.data.assignment.

Every message has a fixed cost, about a millisecond on a slow network, so many small gradients should share one
message. But a bucket can be launched only when its last gradient is ready: a single bucket for everything starts
after backward, when no computation is left to overlap with. Hence the limit, and a smaller first bucket, so that
communication starts early. The buckets keep the order of the names, which is the order in which backward finishes the
parameters.

Usual wrong answers:
* a bucket ends when it has passed the limit, not before
* puts each parameter into any bucket that has room, so the order is lost
* calls the package's own
* all in one bucket, whatever the limit
* a first parameter that is too large leaves an empty bucket before it
* the first bucket may be larger than the limit
* the second bucket is measured by the first one's limit too
* all buckets have the limit of the first
* all buckets have the same limit
* a first limit of 0 is taken for none
* what fits exactly begins another bucket
* goes on counting what is in earlier buckets
* a bucket for every parameter
* calls torch's own
* a parameter larger than the limit is left out
* no bucket at all
"""

from collections.abc import Mapping


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
