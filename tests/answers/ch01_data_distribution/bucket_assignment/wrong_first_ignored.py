"""a_small_first_bucket: all buckets have the same limit"""


def assign(sizes, limit, first=None):
    buckets, filled = [], 0
    for name, size in sizes.items():
        room = limit
        if not buckets or filled + size > room:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += size
    return buckets
