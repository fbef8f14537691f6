"""Differences between a rank's tensors and those of one process, and the first that exceeds its tolerance.

A comparison that accepts a wrong value would be the worst bug of this project. So whatever cannot be compared (shapes
that do not match, non-finite numbers on either side, a tensor that only one side has) differs infinitely.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minidist.parameters import Box, ParamSpec

FirstWrong = tuple[tuple[int, int, int], str]

# In the order of reporting within a step: a tensor's name says more than a wrong loss.
KINDS = ("grad", "loss", "grad_norm", "param")


def relative_difference(mine: Tensor, whole: Tensor, spec: ParamSpec) -> float:
    """max|a - b| / max|b|: this rank's shard `a` against the same box of the reference `b`, over b's global maximum.

    mine: of the shape of the spec's only box, or all boxes concatenated in one dimension. The difference is absolute
    where the reference is all zeros, and 0 where this rank has no elements of the tensor.
    """
    fits = len(spec.boxes) == 1 and mine.shape == spec.boxes[0].shape
    if whole.shape != spec.shape or not (fits or mine.shape == (spec.numel,)):
        return math.inf
    if not (torch.isfinite(mine).all() and torch.isfinite(whole).all()):
        return math.inf
    parts = [whole[box.slices].reshape(-1) for box in spec.boxes]
    theirs = torch.cat(parts).double() if parts else whole.new_empty(0).double()
    mine = mine.detach().reshape(-1).double()
    if mine.shape != theirs.shape:  # a box that reaches beyond the tensor was cut to it
        return math.inf
    if not mine.numel():
        return 0.0
    return ((mine - theirs).abs().max() / (whole.abs().max().double() or 1.0)).item()


def relative_scalar_difference(mine: float | None, whole: float) -> float:
    """|a - b| / |b| of two numbers; infinite if one is None or non-finite."""
    if mine is None or not (math.isfinite(mine) and math.isfinite(whole)):
        return math.inf
    return abs(mine - whole) / (abs(whole) or 1.0)


@dataclass
class Comparison:
    """The largest difference of each kind on one rank, and the first that exceeds its tolerance.

    tolerance: of the kinds that are judged; the others are only reported.
    worst: (difference / tolerance, name) of the tensor where that ratio is largest.
    first: the first difference beyond its tolerance: (step, kind, order) and text, "step 0 grad model.norm.weight".
    on_first: called as soon as `first` is known, since a wrong run may not reach its end.
    """

    tolerance: Mapping[str, float]
    largest: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    worst: tuple[float, str | None] = (-1.0, None)
    first: FirstWrong | None = None
    on_first: Callable[[FirstWrong], None] = lambda first: None
    _seen: int = 0

    def add_difference(self, kind: str, step: int, name: str | None, diff: float) -> None:
        """Add one difference; `name` is a tensor's, None for a number."""
        self._seen += 1
        diff = math.inf if math.isnan(diff) else diff  # max() would ignore a NaN
        self.largest[kind] = max(self.largest[kind], diff)
        if kind not in self.tolerance:
            return
        part = diff / self.tolerance[kind]
        if name is not None and part > self.worst[0]:
            self.worst = (part, name)
        if part > 1:
            self._wrong(step, kind, f"step {step} {kind} {name or ''}".rstrip())

    def compare_tensor(
        self, kind: str, step: int, name: str, mine: Tensor | None, whole: Tensor | None, spec: ParamSpec
    ) -> None:
        """Compare a tensor; either side may be None (a parameter that was not used)."""
        if mine is not None and whole is not None:
            self.add_difference(kind, step, name, relative_difference(mine, whole, spec))
        else:
            self.add_difference(kind, step, name, 0.0 if mine is whole else math.inf)

    def record_failure(self, step: int, kind: str, what: str) -> None:
        """Record something wrong that has no numerical difference."""
        self.largest[kind] = math.inf
        self._wrong(step, kind, f"step {step} {what}")

    def _wrong(self, step: int, kind: str, what: str) -> None:
        place = (step, KINDS.index(kind), self._seen)
        if self.first is None or place < self.first[0]:
            self.first = (place, what)
            self.on_first(self.first)

    def compare_number(self, kind: str, step: int, mine: float | None, whole: float) -> None:
        """Compare a number that every rank has."""
        self.add_difference(kind, step, None, relative_scalar_difference(mine, whole))


def has_uncovered_elements(shape: tuple[int, ...], boxes: Iterable[Box]) -> bool:
    """Whether some element of a tensor is in none of the boxes of all ranks."""
    held = torch.zeros(shape, dtype=torch.bool)
    for box in boxes:
        held[box.slices] = True
    return not held.all()
