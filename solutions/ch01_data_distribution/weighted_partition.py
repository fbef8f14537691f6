"""Shares in proportion to weights: the solution, as it stands in minidist.data.partition.

The largest-remainder method (Hamilton's method) gives shares that sum to n and differ from the exact ones by less
than one. Rounding each share separately can give another sum. Fractions are exact: they give the same shares on every
machine, even where a float cannot represent n.

Usual wrong answers:
* starts each block as if all lower ranks had this rank's size
* calls the package's functions
* returns one fixed answer for every input
* rounds the weights to float32
* computes in floats, which cannot represent the shares of many samples
* rounds the weights to hundredths
* computes the starts in int32, which overflows at 2**31
* truncates the weights to integers
* rounds the weights to fractions with small denominators
* checks no weights if there is no sample
* compares the fractional parts as floats, which takes close ones for ties
* rounds the shares down and drops the leftover samples
* gives the leftover samples to the first ranks
* gives all leftover samples to the largest weight
* rounds every share separately, so their sum may differ from n
* returns an array instead of a list
* rounds the weights to fractions with a denominator of at most 100
* ties go to the higher rank
* accepts a rank outside the world
* converts the weights to integers, so weights below one become zero
* gives every rank nothing
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from minidist.data.partition import _check


def apportion(n: int, weights: Sequence[float]) -> list[int]:
    """Split n into integers proportional to `weights`, by the largest remainder method; their sum is n.

    A weight of 0 gets 0; every result differs from n w_i / sum(w) by at most one. Equal weights give the sizes of
    `block_partition`. Raises ValueError for weights that are empty, negative, non-finite, or all zero.
    """
    if n < 0:
        raise ValueError(f"cannot share n={n} samples: n must be at least 0")
    if not all(math.isfinite(w) and w >= 0 for w in weights) or not any(weights):
        raise ValueError(f"weights={list(weights)}: each must be finite and at least 0, and one must be above 0")
    exact = [Fraction(w) for w in weights]  # exact arithmetic: the same result on every machine
    total = sum(exact)
    quotas = [n * w / total for w in exact]
    shares = [math.floor(q) for q in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda i: shares[i] - quotas[i])  # stable: ties to the lower rank
    for i in by_remainder[: n - sum(shares)]:
        shares[i] += 1
    return shares


def weighted_partition(n: int, weights: Sequence[float], rank: int) -> np.ndarray:
    """Return the indices, (size,) int64, of `rank`'s consecutive block of 0..n-1; sizes are proportional to `weights`.

    Raises ValueError for a rank outside 0..len(weights)-1, or weights that are negative, non-finite or all zero.
    """
    _check(n, len(weights), rank)
    cuts = np.cumsum([0, *apportion(n, weights)])
    return np.arange(cuts[rank], cuts[rank + 1], dtype=np.int64)
