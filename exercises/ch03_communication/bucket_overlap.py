"""The best bucket size.

Write the missing lines of bucket_intervals and last_bucket_end_s and best_bucket_bytes; its docstring specifies the
result.
You may call: max, min, zip, range, accumulate, bucket_intervals, last_bucket_end_s.
Check it with: python -m exercises check bucket_overlap

Stub e3227ced.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate


def bucket_intervals(ready_s: Sequence[float], durations_s: Sequence[float]) -> list[tuple[float, float]]:
    """Return (start, end) of each bucket's reduction, in seconds since the start of backward.

    ready_s: when the last gradient of each bucket is ready, in index order, which may differ from the order in time.
    durations_s: how long each bucket's reduction takes. A reduction starts when its bucket is ready and the one before
    it is done. Raises ValueError when the lengths differ.
    """
    raise NotImplementedError("return the start and end time of each bucket's reduction")


def last_bucket_end_s(total: int, bucket: int, backward_s: float, seconds: Callable[[float], float]) -> float:
    """Return when the last of `total` bytes of gradients is reduced, in seconds since the start of backward.

    Backward produces gradients at a constant rate over `backward_s`; each bucket has `bucket` bytes, the last one the
    remainder. seconds: how long reducing that many bytes takes during backward. 0.0 when `total` is 0.
    """
    if total == 0:
        return 0.0
    raise NotImplementedError("return the end time of the last bucket's reduction")


def best_bucket_bytes(
    total: int, backward_s: float, seconds: Callable[[float], float], choices: Sequence[int] = ()
) -> int:
    """Return the bucket size in bytes with which all gradients are reduced soonest; of equals, the largest.

    Small buckets pay the latency often; with large ones the last reduction, which nothing overlaps, takes long.
    choices: sizes to consider, by default powers of two from 64 KiB to one bucket for everything.
    """
    sizes = choices or [1 << k for k in range(16, max(17, (max(total, 1) - 1).bit_length() + 1))]
    raise NotImplementedError("return the size whose last reduction ends earliest; among equals the largest")
