"""Overlap of gradient buckets with backward: a model of when each bucket is reduced, and the best bucket size.

Backward produces the gradients one after another. A bucket is reduced once all its gradients are ready and the bucket
before it has been reduced: every rank launches buckets in index order, whatever the order of its autograd. Reductions
that end before backward does cost no extra time. Li et al. 2020 (PyTorch Distributed), section 3.2.3.

The model assumes that communication does not slow backward down. Where both need the same cores nothing overlaps, and
fewer messages are always better.
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
