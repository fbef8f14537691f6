"""every_name_once: puts each parameter into any bucket that has room, so the order is lost"""


def assign(sizes, limit, first=None):
    buckets = []
    for name, size in sizes.items():
        for bucket in buckets:
            if sum(sizes[each] for each in bucket) + size <= limit:
                bucket.append(name)
                break
        else:
            buckets.append([name])
    return buckets
