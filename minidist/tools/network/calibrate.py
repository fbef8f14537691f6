"""Calibration of the cost model: alpha, beta and gamma of this machine, fitted to measured times.

`measure_collectives` runs on every rank of a job. It times one round of transfers (every rank sends to the next at
once, as in a round of the algorithms), an addition, the package's algorithms, and the backend's own collectives.
`fit_link` fits a `Link` to such samples by the least sum of relative errors, so that outliers do not dominate and a
microsecond weighs as much as a second.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minidist.comm import collectives
from minidist.comm.group import Group
from minidist.simple.collectives import (
    ALL_REDUCE,
    exchange,
    ring_all_gather,
    ring_reduce_scatter,
    tree_broadcast,
    tree_reduce,
)
from minidist.tools.network.cost import ZERO_COST, Cost, Link, collective_cost

BACKEND = "backend"  # the library's own algorithm, whatever it is; modelled as the ring
_STEPS = 50


@dataclass(frozen=True)
class TimedOperation:
    """A measured time: one operation on one tensor size.

    name: a collective, "round" (every rank sends to the next) or "add" (an addition on each rank). algorithm: the
    collective's, as in `collective_cost`; `BACKEND` for the backend's own; "" for "round" and "add". group_size: number
    of ranks. num_bytes: size of the tensor, as in `collective_cost`. seconds: time of the slowest rank, median of the
    repetitions.
    """

    name: str
    algorithm: str
    group_size: int
    num_bytes: int
    seconds: float

    @property
    def cost(self) -> Cost:
        """How many rounds, bytes sent and bytes reduced the cost model counts for this operation."""
        if self.name == "round":
            return Cost(1, self.num_bytes)
        if self.name == "add":
            return Cost(0, 0, self.num_bytes)
        return modelled_cost(self.name, self.algorithm, self.group_size, self.num_bytes)


def modelled_cost(operation: str, algorithm: str, group_size: int, num_bytes: float) -> Cost:
    """Return the modelled cost of a collective, as `collective_cost` does, also for algorithm `BACKEND`.

    `BACKEND`, the backend's own algorithm, is modelled as a binomial tree for a broadcast, as pairwise exchange for an
    all_to_all, and as a ring otherwise.
    """
    if algorithm != BACKEND:
        return collective_cost(operation, algorithm, group_size, num_bytes)
    return collective_cost(
        operation, {"broadcast": "tree", "all_to_all": "pairwise"}.get(operation, "ring"), group_size, num_bytes
    )


def measure_collectives(group: Group, sizes_bytes: Sequence[int], repeats: int) -> list[TimedOperation]:
    """Time every collective by each of its algorithms at every size; return the same times on all ranks. Collective.

    sizes_bytes: sizes of the tensors, rounded up to whole chunks. repeats: how often each case is timed, after one
    warm-up. Every repetition runs all cases once, so other load on the machine affects all of them equally.
    """
    unit = 4 * group.size
    sizes_bytes = [-(-n // unit) * unit for n in sizes_bytes]
    cases = [(name, algorithm, n, run) for n in sizes_bytes for name, algorithm, run in _timed_cases(group, n)]
    times = torch.zeros(len(cases), repeats, dtype=torch.float64)
    for turn in range(-1, repeats):
        for i, (_, _, _, run) in enumerate(cases):
            collectives.barrier(group)
            start_s = time.perf_counter()
            run()
            if turn >= 0:
                times[i, turn] = time.perf_counter() - start_s
    collectives.all_reduce(times, group, "max")  # an operation has ended when it has ended on all ranks
    return [
        TimedOperation(name, algorithm, group.size, n, statistics.median(row))
        for (name, algorithm, n, _), row in zip(cases, times.tolist(), strict=True)
    ]


def _timed_cases(group: Group, n: int) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Yield (operation, algorithm, call) of all timed cases, on float32 tensors of n bytes."""
    size, rank = group.size, group.rank
    whole, other, part = torch.ones(n // 4), torch.ones(n // 4), torch.ones(n // 4 // size)
    right, left = (rank + 1) % size, (rank - 1) % size
    yield "round", "", lambda: exchange(group, send=(whole, right), recv=(other, left))
    yield "add", "", lambda: torch.maximum(whole, other, out=whole)
    # The maximum: repeated sums would overflow.
    yield "broadcast", "tree", lambda: tree_broadcast(whole, 0, group)
    yield "broadcast", BACKEND, lambda: collectives.broadcast(whole, 0, group)
    yield "reduce", "tree", lambda: tree_reduce(whole, 0, group, "max")
    yield "all_gather", "ring", lambda: ring_all_gather(list(whole.split(len(part))), group)
    yield "all_gather", BACKEND, lambda: collectives.all_gather(other, part, group)
    yield "reduce_scatter", "ring", lambda: ring_reduce_scatter(list(whole.split(len(part))), group, "max")
    yield "reduce_scatter", BACKEND, lambda: collectives.reduce_scatter(part, whole, group, "max")
    for algorithm, all_reduce in {**ALL_REDUCE, BACKEND: collectives.all_reduce}.items():
        yield "all_reduce", algorithm, lambda all_reduce=all_reduce: all_reduce(whole, group, "max")
    yield "all_to_all", BACKEND, lambda: collectives.all_to_all(other, whole, group)


def fit_link(samples: Iterable[TimedOperation]) -> Link:
    """Return the latency, seconds per byte sent and seconds per byte reduced that explain the measured times best.

    They minimise the sum of |modelled / measured - 1| over the samples, by iteratively reweighted least squares. No
    figure is negative; a figure that the samples do not determine is 0. Raises ValueError without samples.
    """
    samples = list(samples)
    if not samples:
        raise ValueError("nothing to fit: no samples")
    counts = [(one.num_rounds, one.sent_bytes, one.reduced_bytes) for one in (sample.cost for sample in samples)]
    rows = np.array(counts, dtype=float) / np.array([[sample.seconds] for sample in samples])
    used = [column for column in range(3) if rows[:, column].any()]
    while True:
        coefficients = _minimise_absolute_error(rows[:, used])
        if (coefficients >= 0).all():
            break
        used.pop(int(coefficients.argmin()))  # a figure that would be negative is 0
    figures = np.zeros(3)
    figures[used] = coefficients
    return Link(*map(float, figures))


def _minimise_absolute_error(rows: np.ndarray) -> np.ndarray:
    """Return x with the least sum of |rows x - 1|; columns, which differ by orders of magnitude, are scaled first."""
    if rows.shape[1] == 0:
        return np.zeros(0)
    scale = np.abs(rows).max(axis=0)
    scaled, weights = rows / scale, np.ones(len(rows))
    for _ in range(_STEPS):
        x = np.linalg.lstsq(scaled * weights[:, None], weights, rcond=None)[0]
        weights = 1 / np.sqrt(np.maximum(np.abs(scaled @ x - 1), 1e-6))
    return x / scale


def fit_link_to_primitives(samples: Iterable[TimedOperation]) -> Link:
    """Return the link fitted as by `fit_link`, but to the "round" and "add" samples alone.

    Such a link predicts the time of algorithms that have never run.
    """
    samples = list(samples)
    line = fit_link(sample for sample in samples if sample.name == "round")
    # The overhead of the call dominates small additions: gamma comes from the larger half of the sizes.
    adding = sorted((sample for sample in samples if sample.name == "add"), key=lambda sample: sample.num_bytes)
    return Link(line.alpha_s, line.beta_s, fit_link(adding[len(adding) // 2 :]).gamma_s)


def relative_errors(samples: Iterable[TimedOperation], link: Link) -> list[float]:
    """Return |modelled / measured - 1| of each sample, with the modelled time on `link`; skips samples of zero cost."""
    samples = [sample for sample in samples if sample.cost != ZERO_COST]
    return [abs(sample.cost.seconds(link) / sample.seconds - 1) for sample in samples]
