"""every_name_once: a parameter larger than the limit is left out"""


def assign(sizes, limit, first=None):
    buckets, filled = [], 0
    for name, size in sizes.items():
        if size > limit:
            continue
        if not buckets or filled + size > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += size
    return buckets
