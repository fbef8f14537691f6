"""Gives each leftover sample to the rank that is furthest below its share."""

from fractions import Fraction

import numpy as np


def sizes(n, weights):
    total = sum(map(Fraction, weights))
    quotas = [Fraction(w) * n / total for w in weights]
    shares = [int(q) for q in quotas]
    gave = [0] * len(shares)
    while sum(shares) < n:
        i = max(range(len(shares)), key=lambda i: (not gave[i], quotas[i] - shares[i], -i))
        shares[i] += 1
        gave[i] = 1
    return shares


def weighted(n, weights, rank):
    cuts = np.cumsum([0, *sizes(n, weights)])
    return np.arange(cuts[rank], cuts[rank + 1], dtype=np.int64)
