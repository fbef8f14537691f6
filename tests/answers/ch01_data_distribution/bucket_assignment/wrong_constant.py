"""as_few_as_can_be: all in one bucket, whatever the limit"""


def assign(sizes, limit, first=None):
    return [list(sizes)] if sizes else []
