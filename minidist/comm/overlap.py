"""Which part of the communication backward hides, and how large a bucket of gradients had better be.

Backward gives one gradient after the other. Those of a bucket travel together, as soon as the last of them is there and
no bucket ahead is still on its way or missing: every rank launches in index order, whatever order its autograd has.
What is reduced before backward ends costs no time of its own. Li et al. 2020 (PyTorch Distributed), section 3.2.3.

Taken for granted is that the network works beside backward; where both need the same cores nothing is hidden, and fewer
messages are always better.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate


def in_flight(full_s: Sequence[float], lasts_s: Sequence[float]) -> list[tuple[float, float]]:
    """When the reduction of each bucket begins and ends, in seconds from the begin of backward: (begins, ends) of each.

    full_s: when the last gradient of each bucket is there, in index order, which need not be the order of time.
    lasts_s: what the reduction of each takes. A bucket begins when it is full and the one before it is done.
    Raises ValueError when there are not as many of one as of the other.
    """
    times, done_s = [], 0.0
    for full, lasts in zip(full_s, lasts_s, strict=True):
        begins_s = max(full, done_s)
        done_s = begins_s + lasts
        times.append((begins_s, done_s))
    return times


def finished_s(total: int, bucket: int, backward_s: float, seconds: Callable[[float], float]) -> float:
    """When the last of `total` bytes of gradients is reduced, counted from the begin of backward; 0.0 without any.

    Backward gives gradients at an even rate over `backward_s`; buckets are of `bucket` bytes, the last of the rest.
    seconds: what the reduction of that many bytes takes while backward runs.
    """
    if total == 0:
        return 0.0
    sizes = [min(bucket, total - given) for given in range(0, total, bucket)]
    full_s = [backward_s * given / total for given in accumulate(sizes)]
    return in_flight(full_s, [seconds(size) for size in sizes])[-1][1]


def best_bucket(total: int, backward_s: float, seconds: Callable[[float], float], choices: Sequence[int] = ()) -> int:
    """The bucket size in bytes with which the gradients are reduced soonest; of equals the largest.

    Small ones pay alpha often; with large ones the last, which nothing hides, is long. choices: powers of two from 64
    KiB up to all in one when not given.
    """
    sizes = choices or [1 << k for k in range(16, max(17, (max(total, 1) - 1).bit_length() + 1))]
    return min(sizes, key=lambda size: (finished_s(total, size, backward_s, seconds), -size))
