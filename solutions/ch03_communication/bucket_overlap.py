"""The best bucket size: the solution, as it stands in minidist.comm.overlap.

A bucket waits for its last gradient and for the bucket before it. As long as the network is faster than backward, all
buckets but the last are hidden, and a step pays only for the last one: smaller buckets cost less. But every bucket
pays alpha. If the sum of these latencies exceeds the duration of backward, communication never catches up, and a step
pays for the number of messages. The best size lies between. It depends on the link: with cheaper bytes there is time
for more messages, and smaller buckets are better.

All ranks launch in index order, because a collective pairs the n-th launches of the ranks. A bucket that fills up
early therefore waits for a bucket with a lower index that is not yet full. If the bucket order differs from the order
of backward, the overlap is lost. That is why DDP rebuilds its buckets after the first step, in the observed order.

Usual wrong answers:
* nothing begins before all gradients are there
* buckets are taken to travel side by side, as if each had a network of its own
* the bucket that is full first leaves first
* each bucket is taken to need the same part of backward, the smaller last one too
* the package's own
* the same times for everything
* a bucket that is full early leaves early, past those ahead of it
* all in one bucket, which nothing hides
* a bucket is taken to be full when its first gradient is there
* the last bucket is taken to be as large as the others
* the network begins when backward is over
* whole buckets only, and the rest of the gradients is forgotten
* the size whose one reduction is shortest
* of equally good sizes the smallest, which costs messages for nothing
* a bucket waits until the next gradient after it is there
* nothing takes any time
"""

from collections.abc import Callable, Sequence
from itertools import accumulate


def bucket_intervals(ready_s: Sequence[float], durations_s: Sequence[float]) -> list[tuple[float, float]]:
    """Return (start, end) of each bucket's reduction, in seconds since the start of backward.

    ready_s: when the last gradient of each bucket is ready, in index order, which may differ from the order in time.
    durations_s: how long each bucket's reduction takes. A reduction starts when its bucket is ready and the one before
    it is done. Raises ValueError when the lengths differ.
    """
    times, done_s = [], 0.0
    for full, lasts in zip(ready_s, durations_s, strict=True):
        begins_s = max(full, done_s)
        done_s = begins_s + lasts
        times.append((begins_s, done_s))
    return times


def last_bucket_end_s(total: int, bucket: int, backward_s: float, seconds: Callable[[float], float]) -> float:
    """Return when the last of `total` bytes of gradients is reduced, in seconds since the start of backward.

    Backward produces gradients at a constant rate over `backward_s`; each bucket has `bucket` bytes, the last one the
    remainder. seconds: how long reducing that many bytes takes during backward. 0.0 when `total` is 0.
    """
    if total == 0:
        return 0.0
    sizes = [min(bucket, total - given) for given in range(0, total, bucket)]
    ready_s = [backward_s * given / total for given in accumulate(sizes)]
    return bucket_intervals(ready_s, [seconds(size) for size in sizes])[-1][1]


def best_bucket_bytes(
    total: int, backward_s: float, seconds: Callable[[float], float], choices: Sequence[int] = ()
) -> int:
    """Return the bucket size in bytes with which all gradients are reduced soonest; of equals, the largest.

    Small buckets pay the latency often; with large ones the last reduction, which nothing overlaps, takes long.
    choices: sizes to consider, by default powers of two from 64 KiB to one bucket for everything.
    """
    sizes = choices or [1 << k for k in range(16, max(17, (max(total, 1) - 1).bit_length() + 1))]
    return min(sizes, key=lambda size: (last_bucket_end_s(total, size, backward_s, seconds), -size))
