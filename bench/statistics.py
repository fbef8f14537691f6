"""Paired ratios and how sure one may be of their median."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """A median and the two ends of its bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def step_times(spans: np.ndarray) -> np.ndarray:
    """Seconds from the first rank's start to the last rank's end.

    spans: (ranks, rounds, 2 or more) start, end on a clock that all ranks share. Returns (rounds,).
    """
    return spans[:, :, 1].max(axis=0) - spans[:, :, 0].min(axis=0)


def paired_ratios(ours: Sequence[float], theirs: Sequence[float]) -> np.ndarray:
    """ours / theirs of each round: what slows down a whole round cancels. Raises ValueError for unequal lengths."""
    ours, theirs = np.asarray(ours, float), np.asarray(theirs, float)
    if ours.shape != theirs.shape or not ours.size:
        raise ValueError(f"paired times need the same number of rounds, at least one: {ours.shape} and {theirs.shape}")
    return ours / theirs


def paired_interval(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """The median of ours / theirs over the rounds."""
    return median_interval(paired_ratios(ours, theirs))


def median_interval(values: Sequence[float], level: float = 0.95, resamples: int = 10_000, seed: int = 0) -> Interval:
    """Median with its percentile bootstrap interval (Efron 1979): medians of samples drawn with replacement."""
    values = np.asarray(values, float)
    draws = np.random.default_rng(seed).integers(0, values.size, (resamples, values.size))
    medians = np.median(values[draws], axis=1)
    low, high = np.quantile(medians, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(np.median(values)), float(low), float(high))


def overhead_ratio(
    ours: Sequence[float],
    theirs: Sequence[float],
    floor: Sequence[float],
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Median of what ours takes beyond the floor, over that of theirs, with the bootstrap interval over rounds.

    All of the same rounds. Differences are small and their ratio in one round means little: each median is taken first.
    Infinite where theirs takes no more than the floor.
    """
    ours, theirs, floor = (np.asarray(values, float) for values in (ours, theirs, floor))

    def ratio(of: np.ndarray) -> np.ndarray:
        above, below = (np.median((times - floor)[of], axis=-1) for times in (ours, theirs))
        return np.divide(above, below, out=np.full_like(above, np.inf), where=below > 0)

    found = ratio(np.random.default_rng(seed).integers(0, floor.size, (resamples, floor.size)))
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2], method="inverted_cdf")
    return Interval(float(ratio(np.arange(floor.size)[None])[0]), float(low), float(high))
