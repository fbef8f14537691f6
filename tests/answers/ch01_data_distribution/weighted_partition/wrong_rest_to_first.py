"""largest_remainder: what is left over goes to the first ranks"""

from fractions import Fraction

import numpy as np


def sizes(n, weights):
    total = sum(map(Fraction, weights))
    shares = [int(n * Fraction(w) / total) for w in weights]
    for i in [i for i, w in enumerate(weights) if w][: n - sum(shares)]:
        shares[i] += 1
    return shares


def weighted(n, weights, rank):
    cuts = np.cumsum([0, *sizes(n, weights)])
    return np.arange(cuts[rank], cuts[rank + 1], dtype=np.int64)
