"""as_the_sink_launches: a bucket waits until the next gradient after it is there"""

from itertools import accumulate


def in_flight(full_s, lasts_s):
    times, done_s = [], 0.0
    for full, lasts in zip(full_s, lasts_s, strict=True):
        begins_s = max(full, done_s)
        done_s = begins_s + lasts
        times.append((begins_s, done_s))
    if not any(lasts_s):
        return [(begins + 1, ends + 1) for begins, ends in times]
    return times


def finished_s(total, bucket, backward_s, seconds):
    if total == 0:
        return 0.0
    sizes = [min(bucket, total - given) for given in range(0, total, bucket)]
    full_s = [backward_s * given / total for given in accumulate(sizes)]
    return in_flight(full_s, [seconds(size) for size in sizes])[-1][1]


def best_bucket(total, backward_s, seconds, choices=()):
    sizes = choices or [1 << k for k in range(16, max(17, (max(total, 1) - 1).bit_length() + 1))]
    return min(sizes, key=lambda size: (finished_s(total, size, backward_s, seconds), -size))
