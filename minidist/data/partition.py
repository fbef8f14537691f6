"""Partitions of n samples over ranks, as pure functions that return the indices of one rank.

Every index 0..n-1 belongs to exactly one rank, also if there are more ranks than samples. No sample is dropped or
repeated to make sizes equal: the loss is divided by the true number of tokens.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from minidist.hashing import hash64


def block_partition(n: int, world_size: int, rank: int) -> np.ndarray:
    """Return the indices, (size,) int64, of `rank`'s block of 0..n-1; block sizes differ by at most one.

    Raises ValueError for n < 0, world_size < 1 or a rank outside 0..world_size-1.
    """
    _check(n, world_size, rank)
    size, longer = divmod(n, world_size)  # the first `longer` ranks hold one more
    start = rank * size + min(rank, longer)
    return np.arange(start, start + size + (rank < longer), dtype=np.int64)


def strided_partition(n: int, world_size: int, rank: int) -> np.ndarray:
    """Return the indices rank, rank + world_size, rank + 2 world_size, ... below n, (size,) int64.

    Raises ValueError for n < 0, world_size < 1 or a rank outside 0..world_size-1.
    """
    _check(n, world_size, rank)
    return np.arange(rank, n, world_size, dtype=np.int64)


def random_partition(n: int, world_size: int, rank: int, seed: int, epoch: int = 0) -> np.ndarray:
    """Return `rank`'s block, (size,) int64, of a permutation of 0..n-1 that depends on seed and epoch only.

    Block sizes differ by at most one. Raises ValueError for n < 0, world_size < 1 or a rank outside 0..world_size-1.
    """
    mine = block_partition(n, world_size, rank)
    return permutation(n, seed, epoch)[mine]


def weighted_partition(n: int, weights: Sequence[float], rank: int) -> np.ndarray:
    """Return the indices, (size,) int64, of `rank`'s consecutive block of 0..n-1; sizes are proportional to `weights`.

    Raises ValueError for a rank outside 0..len(weights)-1, or weights that are negative, non-finite or all zero.
    """
    _check(n, len(weights), rank)
    cuts = np.cumsum([0, *apportion(n, weights)])
    return np.arange(cuts[rank], cuts[rank + 1], dtype=np.int64)


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


def permutation(n: int, seed: int, epoch: int = 0) -> np.ndarray:
    """Return a permutation of 0..n-1, (n,) int64: the indices sorted by a hash of seed, epoch and index."""
    if n < 0:
        raise ValueError(f"cannot order n={n} samples: n must be at least 0")
    return np.argsort(hash64(seed, epoch, np.arange(n))).astype(np.int64, copy=False)


def _check(n: int, world_size: int, rank: int) -> None:
    """Raise ValueError unless n >= 0 samples can be divided over world_size >= 1 ranks, of which `rank` is one."""
    if n < 0 or world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"n={n}, world_size={world_size}, rank={rank}: need n >= 0, world_size >= 1 and 0 <= rank < world_size"
        )
