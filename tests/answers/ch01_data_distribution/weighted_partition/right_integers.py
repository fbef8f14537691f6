"""Brings the weights to whole numbers first."""

import numpy as np


def sizes(n, weights):
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
    counts = sizes(n, weights)
    start = sum(counts[:rank])
    return np.array(range(start, start + counts[rank]), dtype=np.int64)
