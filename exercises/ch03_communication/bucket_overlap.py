"""The best bucket size.

Write the missing lines of bucket_intervals, last_bucket_end_s and best_bucket_bytes; their docstrings specify the
results.
You may call: max, min, zip, range, accumulate, bucket_intervals, last_bucket_end_s.
Check it with: python -m exercises check bucket_overlap

Stub 835340db.
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
    if total_bytes == 0:
        return 0.0
    raise NotImplementedError("return the end time of the last bucket's reduction")


def best_bucket_bytes(
    total_bytes: int, backward_s: float, reduction_s: Callable[[float], float], choices: Sequence[int] = ()
) -> int:
    """Return the size of gradient buckets, in bytes, with which all gradients are reduced soonest.

    Of equally good sizes, the largest. Small buckets pay the latency often; with large ones the last reduction, which
    backward cannot hide, takes long. total_bytes, backward_s, reduction_s: as in `last_bucket_end_s`. choices: sizes to
    consider; by default powers of two from 64 KiB to one bucket for everything.
    """
    sizes = choices or [1 << k for k in range(16, max(17, (max(total_bytes, 1) - 1).bit_length() + 1))]
    raise NotImplementedError("return the size whose last reduction ends earliest; among equals the largest")
