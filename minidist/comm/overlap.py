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
