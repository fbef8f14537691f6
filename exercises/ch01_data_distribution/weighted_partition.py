"""Shares in proportion to weights.

Machines of different speed get shares of the samples in proportion to their weights. `apportion` computes how many
samples each rank gets, by the largest remainder method, and `weighted_partition` the block of one rank.

The largest remainder method: round every exact share n w_i / sum(w) down, then give the samples that are left, one
each, to the ranks with the largest fractional parts; ties go to the lower rank. weights: numbers from 0 on, not all
0. apportion returns a list of integers whose sum is n; weighted_partition an int64 array, (size,), of consecutive
indices. Blocks follow each other in the order of ranks.
Example: 10 samples with weights [2, 1, 1] have the exact shares 5, 2.5 and 2.5, so the sizes are [5, 3, 2], and rank
1 has [5, 6, 7].

Checked: exact shares, leftovers and ties; that sizes sum to n and are within one of the exact share; weights that are
not integers; sizes that a float cannot represent, such as 3 * 10**17 + 45; ValueError for arguments that make no
sense, which the given lines raise.

You may call:
    Fraction(w)   an exact number: sums, products and quotients of Fractions do not round; math.floor(x)
    sorted(range(len(weights)), key=...)   equal keys keep their order
    apportion(n, weights)   in weighted_partition
    numpy.cumsum(sizes)   sums of the first 1, 2, ... sizes; numpy.arange(start, stop, dtype=numpy.int64)

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
