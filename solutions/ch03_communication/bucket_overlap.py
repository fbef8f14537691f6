"""What backward hides: the solution, as it stands in minidist.comm.overlap.

Two things hold a bucket up: its last gradient, and the bucket ahead. As long as gradients come slower than the
network takes them, all but the last bucket is hidden, and what a step pays for is that last one: smaller buckets,
less to pay. But every bucket pays alpha, and when that is more than backward leaves room for, the network is never
free in time, and the step pays for the number of messages. The best size lies between, and it moves with the link:
where bytes are cheaper there is more time for messages, and smaller buckets are better.

All ranks launch in index order, since a collective pairs what is launched n-th. So a bucket that is full early waits
for one that is not, and an order that is not the one in which backward gives gradients gives the overlap away: that
is why DDP lays its buckets out anew after the first step, when it has seen the order.

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
