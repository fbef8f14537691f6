"""every_name_once: no bucket at all"""


def assign(sizes, limit, first=None):
    return []
