"""A bucket at a time, kept as tuples."""


def assign(sizes, limit, first=None):
    limits = [limit if first is None else min(first, limit)]
    buckets, current = [], ()
    for name, size in sizes.items():
        room = limits[0] if not buckets else limit
        if current and sum(sizes[each] for each in current) + size > room:
            buckets.append(current)
            current = ()
        current += (name,)
    return buckets + [current] * bool(current)
