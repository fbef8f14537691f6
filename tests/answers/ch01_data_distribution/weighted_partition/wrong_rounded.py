"""nothing_is_lost: every share is rounded by itself, and together they are not n"""

import numpy as np


def sizes(n, weights):
    return [round(n * w / sum(weights)) for w in weights]


def weighted(n, weights, rank):
    cuts = np.cumsum([0, *sizes(n, weights)])
    return np.arange(cuts[rank], cuts[rank + 1], dtype=np.int64)
