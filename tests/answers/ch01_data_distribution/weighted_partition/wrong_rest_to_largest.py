"""nothing_is_lost: all that is left over goes to the largest weight"""

from fractions import Fraction

import numpy as np


def sizes(n, weights):
    total = sum(map(Fraction, weights))
    shares = [int(n * Fraction(w) / total) for w in weights]
    shares[max(range(len(weights)), key=lambda i: weights[i])] += n - sum(shares)
    return shares


def weighted(n, weights, rank):
    cuts = np.cumsum([0, *sizes(n, weights)])
    return np.arange(cuts[rank], cuts[rank + 1], dtype=np.int64)
