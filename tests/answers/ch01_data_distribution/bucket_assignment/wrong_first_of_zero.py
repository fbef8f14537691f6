"""a_small_first_bucket: a first limit of 0 is taken for none"""


def assign(sizes, limit, first=None):
    buckets, filled = [], 0
    for name, size in sizes.items():
        room = limit if len(buckets) > 1 or not first else min(first, limit)
        if not buckets or filled + size > room:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += size
    return buckets
