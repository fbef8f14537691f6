"""Counts down the room that is left."""


def assign(sizes, limit, first=None):
    buckets, left = [], 0
    for name in sizes:
        if not buckets or sizes[name] > left:
            buckets.append([])
            left = min(limit, first) if first is not None and len(buckets) == 1 else limit
        buckets[-1].append(name)
        left -= sizes[name]
    return buckets
