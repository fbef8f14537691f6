"""The best bucket size.

Write a model of how gradient buckets overlap with backward: when each reduction starts and ends, when the last one
ends, and which bucket size ends soonest. Reductions run one at a time, in index order, each as soon as its bucket is
ready.

ready_s, durations_s: one number per bucket. reduction_s(num_bytes) returns the seconds of one reduction. choices:
sizes in bytes; the empty default stands for 2**16, 2**17, ... up to the first power of two that is not below
total_bytes, or for 2**16 alone if total_bytes is smaller.
Example: bucket_intervals([2, 1, 6], [3, 1, 1])   is [(2, 5), (5, 6), (6, 7)]: bucket 1 waits for bucket 0
    last_bucket_end_s(10, 4, 5.0, lambda n: 1 + n / 4)   is 7.5: 4, 4 and 2 bytes, ready after 2, 4 and 5 s
    best_bucket_bytes(10, 5.0, lambda n: 1 + n / 4, [2, 4, 8])   is 4: with 2 or 8 bytes the last ends after 8.5 s

Checked: all three against a simulated clock, with buckets that are ready in any order; the launches of the trainer's
own reducer; remainders, no gradients, ties (the largest size wins), and lists of different lengths (ValueError).

You may call:
    zip(ready_s, durations_s, strict=True)   ValueError if the lengths differ
    itertools.accumulate(sizes)   the running sums
    min(sizes, key=function)   the first size with the smallest function(size), which may be a tuple

Check it with: python -m exercises check bucket_overlap

Stub 87c6efc1.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate


def bucket_intervals(ready_s: Sequence[float], durations_s: Sequence[float]) -> list[tuple[float, float]]:
    """Return (start, end) of the reduction of each gradient bucket, in seconds since the start of backward.

    ready_s: when the last gradient of each bucket is ready, in index order, which may differ from the order in time.
    durations_s: how long each bucket's reduction takes. A reduction starts when its bucket is ready and the reduction
    of the bucket before has ended. Raises ValueError if the lengths differ.
    """
    raise NotImplementedError("return the start and end time of each bucket's reduction")


def last_bucket_end_s(
    total_bytes: int, bucket_bytes: int, backward_s: float, reduction_s: Callable[[float], float]
) -> float:
    """Return when all gradient buckets have been reduced, in seconds since the start of backward.

    Backward produces `total_bytes` of gradients at a constant rate over `backward_s`; each bucket has `bucket_bytes`,
    the last one the remainder. reduction_s: a function from a number of bytes to the seconds that reducing them takes.
    Returns 0.0 without gradients.
    """
    raise NotImplementedError("return the end time of the last bucket's reduction")


def best_bucket_bytes(
    total_bytes: int, backward_s: float, reduction_s: Callable[[float], float], choices: Sequence[int] = ()
) -> int:
    """Return the size of gradient buckets, in bytes, with which all gradients are reduced soonest.

    Of equally good sizes, the largest. Small buckets pay the latency often; with large ones the last reduction, which
    backward cannot hide, takes long. total_bytes, backward_s, reduction_s: as in `last_bucket_end_s`. choices: sizes to
    consider; by default powers of two from 64 KiB to one bucket for everything.
    """
    raise NotImplementedError("return the size whose last reduction ends earliest; among equals the largest")
