"""Shares in proportion to weights.

Write the missing lines of apportion and weighted_partition; their docstrings specify the results.
You may call: Fraction, math.floor, sum, sorted, apportion, numpy.cumsum, numpy.arange.
Check it with: python -m exercises check weighted_partition

Stub 7219190e.
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
    raise NotImplementedError("return the shares as integers whose sum is n")


def weighted_partition(n: int, weights: Sequence[float], rank: int) -> np.ndarray:
    """Return the indices, (size,) int64, of `rank`'s consecutive block of 0..n-1; sizes are proportional to `weights`.

    Raises ValueError for a rank outside 0..len(weights)-1, or weights that are negative, non-finite or all zero.
    """
    _check(n, len(weights), rank)
    raise NotImplementedError("return this rank's consecutive block")
