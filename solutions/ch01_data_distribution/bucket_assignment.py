"""Which gradients travel together: the solution, as it stands in minidist.parallel.data.buckets.

A message has a price whatever its size, about a millisecond on a slow network, so a hundred small gradients had
better travel as one. But a bucket can leave only when its last gradient is there: one that holds everything leaves
after backward, when there is nothing left to hide it behind. Hence a limit, and a smaller first bucket, so that the
network has something to do early. Buckets keep the order of the names, which is the order in which backward finishes
them.

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
