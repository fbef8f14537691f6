"""Looks for the longest run of names that fits, bucket by bucket."""


def assign(sizes, limit, first=None):
    names, buckets = list(sizes), []
    while names:
        room = limit if buckets or first is None else min(first, limit)
        end = 1
        while end < len(names) and sum(sizes[name] for name in names[: end + 1]) <= room:
            end += 1
        buckets.append(names[:end])
        names = names[end:]
    return buckets
