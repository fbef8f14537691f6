"""consecutive_blocks: blocks start as if all ranks before had the size of this one"""

from fractions import Fraction

import numpy as np


def sizes(n, weights):
    quotas = [n * Fraction(w) / sum(map(Fraction, weights)) for w in weights]
    shares = [int(q) for q in quotas]
    for i in sorted(range(len(weights)), key=lambda i: shares[i] - quotas[i])[: n - sum(shares)]:
        shares[i] += 1
    return shares


def weighted(n, weights, rank):
    size = sizes(n, weights)[rank]
    return np.arange(rank * size, (rank + 1) * size, dtype=np.int64)
