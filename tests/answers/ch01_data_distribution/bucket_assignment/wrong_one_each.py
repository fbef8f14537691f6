"""as_few_as_can_be: a bucket for every parameter"""


def assign(sizes, limit, first=None):
    return [[name] for name in sizes]
