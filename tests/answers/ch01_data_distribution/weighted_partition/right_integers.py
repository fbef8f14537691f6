"""Brings the weights to whole numbers first."""

import numpy as np

from minidist.data.partition import _check


def sizes(n, weights):
    _check(n, len(weights), 0)
    if not all(0 <= w < float("inf") for w in weights) or not any(weights):
        raise ValueError("these weights share nothing")
    ratios = [float(w).as_integer_ratio() for w in weights]
    common = max(q for _, q in ratios)  # powers of two: the largest is a multiple of all
    whole = [p * (common // q) for p, q in ratios]
    total = sum(whole)
    shares = [n * w // total for w in whole]
    order = np.lexsort((range(len(whole)), [-((n * w % total) / total) for w in whole]))
    for i in order[: n - sum(shares)]:
        shares[i] += 1
    return shares


def weighted(n, weights, rank):
    _check(n, len(weights), rank)
    counts = sizes(n, weights)
    start = sum(counts[:rank])
    return np.array(range(start, start + counts[rank]), dtype=np.int64)
