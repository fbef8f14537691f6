"""No table of times: the end of the last bucket is carried along."""


def in_flight(full_s, lasts_s):
    times = []
    for full, lasts in zip(full_s, lasts_s, strict=True):
        before = times[-1][1] if times else full
        times.append((max(before, full), max(before, full) + lasts))
    return times


def finished_s(total, bucket, backward_s, seconds):
    done_s, given = 0.0, 0
    while given < total:
        size = min(bucket, total - given)
        given += size
        done_s = max(done_s, backward_s * given / total) + seconds(size)
    return done_s


def best_bucket(total, backward_s, seconds, choices=()):
    sizes = list(choices or [1 << k for k in range(16, max(17, (max(total, 1) - 1).bit_length() + 1))])
    times = {size: finished_s(total, size, backward_s, seconds) for size in sizes}
    return max(size for size in sizes if times[size] == min(times.values()))
