"""Ratios of paired step times, and bootstrap confidence intervals of their medians."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class ConfidenceInterval(NamedTuple):
    """A median with the lower and upper end of its bootstrap confidence interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def slowest_rank_times(timings: np.ndarray) -> np.ndarray:
    """Return each round's time in seconds, from the first rank's start to the last rank's end.

    timings: (ranks, rounds, 2 or more); the last axis begins with start and end on a clock common to all ranks.
    Returns shape (rounds,).
    """
    return timings[:, :, 1].max(axis=0) - timings[:, :, 0].min(axis=0)


def paired_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> np.ndarray:
    """Divide two contenders' times round by round, which cancels load that slows a whole round.

    numerators, denominators: one time per round for each contender. Returns one ratio per round. Raises ValueError for
    different numbers of rounds, and for none.
    """
    above, below = np.asarray(numerators, float), np.asarray(denominators, float)
    if above.shape != below.shape or not above.size:
        raise ValueError(f"paired times need the same number of rounds, at least one: {above.shape} and {below.shape}")
    return above / below


def paired_interval(numerators: Sequence[float], denominators: Sequence[float]) -> ConfidenceInterval:
    """Return the median over rounds of the `paired_ratios` of two contenders' times, with its 95 % interval."""
    return median_interval(paired_ratios(numerators, denominators))


def median_interval(
    values: Sequence[float], level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> ConfidenceInterval:
    """Return the median of `values` with its percentile bootstrap interval (Efron 1979).

    level: the confidence level, a fraction. resamples: how many medians of samples, drawn with replacement, to compute.
    """
    values = np.asarray(values, float)
    draws = np.random.default_rng(seed).integers(0, values.size, (resamples, values.size))
    medians = np.median(values[draws], axis=1)
    low, high = np.quantile(medians, [(1 - level) / 2, (1 + level) / 2])
    return ConfidenceInterval(float(np.median(values)), float(low), float(high))


def overhead_ratio(
    ours: Sequence[float],
    theirs: Sequence[float],
    no_communication: Sequence[float],
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> ConfidenceInterval:
    """Return the ratio of two contenders' communication overheads, with a bootstrap interval over rounds.

    A contender's overhead is the median over rounds of its time minus the time of training without communication. The
    ratio of overheads within one round is too noisy to pair, as these are small differences. All arguments: seconds
    per step in the same rounds. Infinite if `theirs` has no overhead.
    """
    ours, theirs, lower_bound = (np.asarray(values, float) for values in (ours, theirs, no_communication))

    def ratio(rounds: np.ndarray) -> np.ndarray:
        above, below = (np.median((times - lower_bound)[rounds], axis=-1) for times in (ours, theirs))
        return np.divide(above, below, out=np.full_like(above, np.inf), where=below > 0)

    resampled = ratio(np.random.default_rng(seed).integers(0, lower_bound.size, (resamples, lower_bound.size)))
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2], method="inverted_cdf")
    return ConfidenceInterval(float(ratio(np.arange(lower_bound.size)[None])[0]), float(low), float(high))
