"""as_few_as_can_be: what fits exactly begins another bucket"""


def assign(sizes, limit, first=None):
    buckets, filled = [], 0
    for name, size in sizes.items():
        room = limit if len(buckets) > 1 or first is None else min(first, limit)
        if not buckets or filled + size >= room:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += size
    return buckets
