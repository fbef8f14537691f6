"""Gives each leftover sample to the rank that is furthest below its share."""

from fractions import Fraction

import numpy as np

from minidist.data.partition import _check


def sizes(n, weights):
    _check(n, len(weights), 0)
    if not all(0 <= w < float("inf") for w in weights) or not any(weights):
        raise ValueError("these weights share nothing")
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
    _check(n, len(weights), rank)
    cuts = np.cumsum([0, *sizes(n, weights)])
    return np.arange(cuts[rank], cuts[rank + 1], dtype=np.int64)
