"""every_name_once: a first parameter that is too large leaves an empty bucket before it"""


def assign(sizes, limit, first=None):
    buckets, filled = [[]] if sizes else [], 0
    for name, size in sizes.items():
        room = limit if len(buckets) > 1 or first is None else min(first, limit)
        if not buckets or filled + size > room:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += size
    return buckets
