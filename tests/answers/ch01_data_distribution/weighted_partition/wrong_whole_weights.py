"""fractions_of_one (raised): weights are made whole numbers, and those below one vanish"""

import numpy as np


def sizes(n, weights):
    quotas = [n * int(w) / sum(map(int, weights)) for w in weights]
    shares = [int(q) for q in quotas]
    for i in sorted(range(len(weights)), key=lambda i: shares[i] - quotas[i])[: n - sum(shares)]:
        shares[i] += 1
    return shares


def weighted(n, weights, rank):
    cuts = np.cumsum([0, *sizes(n, weights)])
    return np.arange(cuts[rank], cuts[rank + 1], dtype=np.int64)
