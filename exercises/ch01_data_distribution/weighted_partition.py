"""Shares in proportion to weights.

Write the missing lines of apportion and weighted_partition; its docstring specifies the result.
You may call: Fraction, math.floor, sum, sorted, apportion, numpy.cumsum, numpy.arange.
Check it with: python -m exercises check weighted_partition

Stub ed0eeac1.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from minidist.data.partition import _check


def apportion(n: int, weights: Sequence[float]) -> list[int]:
    """Whole shares of n in proportion to `weights`, by largest remainder (Hamilton's method); their sum is n.

    A weight of 0 gets nothing, and every share is within one of n w_i / sum(w). Equal weights give the sizes of
    `block_partition`. Raises ValueError for weights that are empty, negative, not finite, or all zero.
    """
    if n < 0:
        raise ValueError(f"cannot share n={n} samples: n must be at least 0")
    if not all(math.isfinite(w) and w >= 0 for w in weights) or not any(weights):
        raise ValueError(f"weights={list(weights)}: each must be finite and at least 0, and one must be above 0")
    raise NotImplementedError("return the shares as integers whose sum is n")


def weighted_partition(n: int, weights: Sequence[float], rank: int) -> np.ndarray:
    """Indices of `rank` when rank i holds a consecutive block in proportion to weights[i].  -> (size,) int64

    Raises ValueError for a bad rank or for weights that `apportion` refuses.
    """
    _check(n, len(weights), rank)
    raise NotImplementedError("return this rank's consecutive block")
