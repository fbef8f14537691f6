"""a_small_first_bucket: the first bucket may be larger than the limit"""


def assign(sizes, limit, first=None):
    buckets, filled = [], 0
    for name, size in sizes.items():
        room = limit if len(buckets) > 1 or first is None else first
        if not buckets or filled + size > room:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += size
    return buckets
