"""fractions_of_one: weights are rounded to fractions with a denominator of at most 100"""

from fractions import Fraction

import numpy as np

from minidist.data.partition import _check


def sizes(n, weights):
    _check(n, len(weights), 0)
    if not all(0 <= w < float("inf") for w in weights) or not any(weights):
        raise ValueError("these weights share nothing")
    total = sum(Fraction(w).limit_denominator(100) for w in weights)
    quotas = [Fraction(w).limit_denominator(100) * n / total for w in weights]
    shares = [int(q) for q in quotas]
    gave = [0] * len(shares)
    while sum(shares) < n:
        i = max(range(len(shares)), key=lambda i: (not gave[i], quotas[i] - shares[i], -i))
        shares[i] += 1
        gave[i] = 1
    return shares


def weighted(n, weights, rank):
    _check(n, len(weights), rank)
    cuts = np.cumsum([0, *sizes(n, weights)])
    return np.arange(cuts[rank], cuts[rank + 1], dtype=np.int64)
