"""whole_shares: nothing for anybody"""

import numpy as np


def sizes(n, weights):
    return [0] * len(weights)


def weighted(n, weights, rank):
    cuts = np.cumsum([0, *sizes(n, weights)])
    return np.arange(cuts[rank], cuts[rank + 1], dtype=np.int64)
