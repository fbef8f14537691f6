"""What backward hides.

Write the missing lines of in_flight and finished_s and best_bucket; the docstring says what is asked.
You may call: max, min, zip, range, accumulate, in_flight, finished_s.
Check it with: python -m exercises check bucket_overlap

Stub 9fe044ae.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate


def in_flight(full_s: Sequence[float], lasts_s: Sequence[float]) -> list[tuple[float, float]]:
    """When the reduction of each bucket begins and ends, in seconds from the begin of backward: (begins, ends) of each.

    full_s: when the last gradient of each bucket is there, in index order, which need not be the order of time.
    lasts_s: what the reduction of each takes. A bucket begins when it is full and the one before it is done.
    Raises ValueError when there are not as many of one as of the other.
    """
    raise NotImplementedError("return when the reduction of each bucket begins and ends")


def finished_s(total: int, bucket: int, backward_s: float, seconds: Callable[[float], float]) -> float:
    """When the last of `total` bytes of gradients is reduced, counted from the begin of backward; 0.0 without any.

    Backward gives gradients at an even rate over `backward_s`; buckets are of `bucket` bytes, the last of the rest.
    seconds: what the reduction of that many bytes takes while backward runs.
    """
    if total == 0:
        return 0.0
    raise NotImplementedError("return when the last bucket is reduced")


def best_bucket(total: int, backward_s: float, seconds: Callable[[float], float], choices: Sequence[int] = ()) -> int:
    """The bucket size in bytes with which the gradients are reduced soonest; of equals the largest.

    Small ones pay alpha often; with large ones the last, which nothing hides, is long. choices: powers of two from 64
    KiB up to all in one when not given.
    """
    sizes = choices or [1 << k for k in range(16, max(17, (max(total, 1) - 1).bit_length() + 1))]
    raise NotImplementedError("return the size with which all is reduced soonest; of equals the largest")
