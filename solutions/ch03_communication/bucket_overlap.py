"""The best bucket size: the solution, as it stands in minidist.tools.network.overlap.

A bucket waits for its last gradient and for the bucket before it. As long as the network is faster than backward, all
buckets but the last are hidden, and a step pays only for the last one: smaller buckets cost less. But every bucket
pays alpha. If the sum of these latencies exceeds the duration of backward, communication never catches up, and a step
pays for the number of messages. The best size lies between. It depends on the link: with cheaper bytes there is time
for more messages, and smaller buckets are better.

All ranks launch in index order, because a collective pairs the n-th launches of the ranks. A bucket that fills up
early therefore waits for a bucket with a lower index that is not yet full. If the bucket order differs from the order
of backward, the overlap is lost. That is why DDP rebuilds its buckets after the first step, in the observed order.

Usual wrong answers:
* no reduction starts before all gradients are ready
* buckets are reduced at the same time, as if each had its own network
* launches buckets in the order in which they become ready
* assumes that every bucket takes the same time in backward, also the smaller last one
* the package's own function
* the same times for every input
* a bucket that is ready early is launched before those with a lower index
* returns no times as soon as one of the lists is empty, before it compares their lengths
* one bucket for everything, whose reduction overlaps with nothing
* assumes that a bucket is ready with its first gradient
* assumes that the last bucket is as large as the others
* of equally good sizes takes the last in the list, which need not be the largest
* the network starts when backward ends
* its default list ends before the size that holds everything
* its default list has one size too many if total_bytes is a power of two
* full buckets only: the remaining gradients are omitted
* chooses the size whose single reduction is shortest
* its default list is empty for small models
* chooses the smallest of equally good sizes, which sends more messages for nothing
* assumes that the time of a reduction is linear in its bytes, and extrapolates from one byte and two
* a bucket is launched only when the next gradient is ready
* every reduction takes no time
"""

from collections.abc import Callable, Sequence
from itertools import accumulate


def bucket_intervals(ready_s: Sequence[float], durations_s: Sequence[float]) -> list[tuple[float, float]]:
    """Return (start, end) of the reduction of each gradient bucket, in seconds since the start of backward.

    ready_s: when the last gradient of each bucket is ready, in index order, which may differ from the order in time.
    durations_s: how long each bucket's reduction takes. A reduction starts when its bucket is ready and the reduction
    of the bucket before has ended. Raises ValueError if the lengths differ.
    """
    times, done_s = [], 0.0
    for full, lasts in zip(ready_s, durations_s, strict=True):
        begins_s = max(full, done_s)
        done_s = begins_s + lasts
        times.append((begins_s, done_s))
    return times


def last_bucket_end_s(
    total_bytes: int, bucket_bytes: int, backward_s: float, reduction_s: Callable[[float], float]
) -> float:
    """Return when all gradient buckets have been reduced, in seconds since the start of backward.

    Backward produces `total_bytes` of gradients at a constant rate over `backward_s`; each bucket has `bucket_bytes`,
    the last one the remainder. reduction_s: a function from a number of bytes to the seconds that reducing them takes.
    Returns 0.0 without gradients.
    """
    if total_bytes == 0:
        return 0.0
    sizes = [min(bucket_bytes, total_bytes - given) for given in range(0, total_bytes, bucket_bytes)]
    ready_s = [backward_s * given / total_bytes for given in accumulate(sizes)]
    return bucket_intervals(ready_s, [reduction_s(size) for size in sizes])[-1][1]


def best_bucket_bytes(
    total_bytes: int, backward_s: float, reduction_s: Callable[[float], float], choices: Sequence[int] = ()
) -> int:
    """Return the size of gradient buckets, in bytes, with which all gradients are reduced soonest.

    Of equally good sizes, the largest. Small buckets pay the latency often; with large ones the last reduction, which
    backward cannot hide, takes long. total_bytes, backward_s, reduction_s: as in `last_bucket_end_s`. choices: sizes to
    consider; by default powers of two from 64 KiB to one bucket for everything.
    """
    sizes = choices or [1 << k for k in range(16, max(17, (max(total_bytes, 1) - 1).bit_length() + 1))]
    return min(sizes, key=lambda size: (last_bucket_end_s(total_bytes, size, backward_s, reduction_s), -size))
