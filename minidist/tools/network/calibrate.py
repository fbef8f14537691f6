"""Alpha, beta and gamma of this machine: measured on its ranks, fitted, and held against sizes that were not fitted.

`measure` runs on every rank of a job. It times one round of transfers (everybody sends to the next rank at once, as the
rounds of the algorithms do), the adding up, our algorithms, and the backend's own collectives. `fit` makes a `Link` of
such samples: the least sum of relative errors, so that a few disturbed measurements do not count for more than others
and a microsecond weighs as much as a second.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minidist.comm import collectives as door
from minidist.comm.algorithms import ALGORITHMS
from minidist.comm.algorithms.primitives import exchange
from minidist.comm.cost import ZERO_COST, Cost, Link, collective_cost
from minidist.comm.group import Group

BACKEND = "backend"  # the library's own algorithm, whatever it is: taken for the ring's counts
_STEPS = 50


@dataclass(frozen=True)
class Sample:
    """One measured size.

    bytes: of the tensor that `collective_cost` is about; seconds: of the slowest rank, the median of the turns.
    """

    name: str
    algorithm: str
    ranks: int
    bytes: int
    seconds: float

    @property
    def counts(self) -> Cost:
        """What the model says it is made of."""
        if self.name == "round":
            return Cost(1, self.bytes)
        if self.name == "add":
            return Cost(0, 0, self.bytes)
        return counts(self.name, self.algorithm, self.ranks, self.bytes)


def counts(name: str, algorithm: str, ranks: int, n: float) -> Cost:
    """The model's counts of an algorithm of ours, or of a library's collective as the convention table names it."""
    if algorithm != BACKEND:
        return collective_cost(name, algorithm, ranks, n)
    return collective_cost(name, {"broadcast": "tree", "all_to_all": "pairwise"}.get(name, "ring"), ranks, n)


def measure(group: Group, sizes: Sequence[int], turns: int) -> list[Sample]:
    """Time everything at the given sizes (bytes, rounded up to whole parts); the same samples on every rank.

    turns: how often each case is run, all cases one after the other each time, so that what else the machine does
    hits all alike. One more turn before them is not counted.
    """
    unit = 4 * group.size
    sizes = [-(-n // unit) * unit for n in sizes]
    cases = [(name, algorithm, n, run) for n in sizes for name, algorithm, run in _cases(group, n)]
    times = torch.zeros(len(cases), turns, dtype=torch.float64)
    for turn in range(-1, turns):
        for i, (_, _, _, run) in enumerate(cases):
            door.barrier(group)
            start_s = time.perf_counter()
            run()
            if turn >= 0:
                times[i, turn] = time.perf_counter() - start_s
    door.all_reduce(times, group, "max")  # an operation is over when it is over on all ranks
    return [
        Sample(name, algorithm, group.size, n, statistics.median(row))
        for (name, algorithm, n, _), row in zip(cases, times.tolist(), strict=True)
    ]


def _cases(group: Group, n: int) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """(operation, algorithm, call) of everything that is timed at n bytes, on tensors of float32."""
    size, rank = group.size, group.rank
    whole, other, part = torch.ones(n // 4), torch.ones(n // 4), torch.ones(n // 4 // size)
    right, left = (rank + 1) % size, (rank - 1) % size
    yield "round", "", lambda: exchange(group, send=[(whole, right)], recv=[(other, left)])
    yield "add", "", lambda: torch.maximum(whole, other, out=whole)
    # The maximum: sums of sums would grow beyond what a float can hold.
    arguments: dict[str, tuple] = {
        "broadcast": (whole, 0, group),
        "reduce": (whole, 0, group, "max"),
        "all_gather": (other, part, group),
        "reduce_scatter": (part, whole, group, "max"),
        "all_reduce": (whole, group, "max"),
        "all_to_all": (other, whole, group),
    }
    for name, algorithms in ALGORITHMS.items():
        library = {BACKEND: getattr(door, name)} if hasattr(door, name) else {}
        for algorithm, call in (algorithms | library).items():
            yield name, algorithm, lambda call=call, name=name: call(*arguments[name])


def fit(samples: Iterable[Sample]) -> Link:
    """The link with the least sum of |model / measured - 1|, none of its figures below 0.

    Least absolute errors by reweighted least squares: an error counts less the larger it is. A figure the samples say
    nothing about is 0. Raises ValueError without samples.
    """
    samples = list(samples)
    if not samples:
        raise ValueError("nothing to fit: no samples")
    each = [(one.rounds, one.sent, one.reduced) for one in (sample.counts for sample in samples)]
    rows = np.array(each, dtype=float) / np.array([[sample.seconds] for sample in samples])
    used = [column for column in range(3) if rows[:, column].any()]
    while True:
        found = _least_absolute(rows[:, used])
        if (found >= 0).all():
            break
        used.pop(int(found.argmin()))  # what wants to be below 0 is 0
    figures = np.zeros(3)
    figures[used] = found
    return Link(*map(float, figures))


def _least_absolute(rows: np.ndarray) -> np.ndarray:
    """x with the least sum of |rows x - 1|. The columns are of very different size, so each is scaled first."""
    if rows.shape[1] == 0:
        return np.zeros(0)
    scale = np.abs(rows).max(axis=0)
    scaled, weights = rows / scale, np.ones(len(rows))
    for _ in range(_STEPS):
        x = np.linalg.lstsq(scaled * weights[:, None], weights, rcond=None)[0]
        weights = 1 / np.sqrt(np.maximum(np.abs(scaled @ x - 1), 1e-6))
    return x / scale


def link_of(samples: Iterable[Sample]) -> Link:
    """The link that rounds of transfers and adding up show: what an algorithm is predicted from before it ever ran."""
    samples = list(samples)
    line = fit(sample for sample in samples if sample.name == "round")
    # A small addition is all call, no bytes: gamma is what the larger half of the sizes shows.
    adding = sorted((sample for sample in samples if sample.name == "add"), key=lambda sample: sample.bytes)
    return Link(line.alpha_s, line.beta_s, fit(adding[len(adding) // 2 :]).gamma_s)


def errors(samples: Iterable[Sample], link: Link) -> list[float]:
    """|predicted / measured - 1| of each sample that the model has a cost for."""
    samples = [sample for sample in samples if sample.counts != ZERO_COST]
    return [abs(sample.counts.seconds(link) / sample.seconds - 1) for sample in samples]
