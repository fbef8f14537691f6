"""nothing_is_lost: shares are rounded down, and the samples left over go to nobody"""

from fractions import Fraction

import numpy as np


def sizes(n, weights):
    return [int(n * Fraction(w) / sum(map(Fraction, weights))) for w in weights]


def weighted(n, weights, rank):
    cuts = np.cumsum([0, *sizes(n, weights)])
    return np.arange(cuts[rank], cuts[rank + 1], dtype=np.int64)
