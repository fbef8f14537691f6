"""Differences between a rank's tensors and the tensors of one process, and the first that exceeds its tolerance.

A comparison that accepts a wrong value would be the worst bug of this project, so the difference is infinite if shapes
do not match, if a number on either side is non-finite, or if only one side has a tensor.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minidist.parameters import Box, ParamSpec

FirstDifference = tuple[tuple[int, int, int], str]

# In the order of reporting within a step: a tensor's name says more than a wrong loss.
KINDS = ("grad", "loss", "grad_norm", "param")


def relative_difference(local: Tensor, reference: Tensor, spec: ParamSpec) -> float:
    """Return max|a - b| / max|b| for this rank's shard `a` and the same elements of the full reference tensor `b`.

    max|b| is taken over all of `b`. The result is absolute where `b` is all zeros, 0 where this rank has no elements of
    the tensor, and infinite if shapes do not match or a number is non-finite. local: the shard, in the shape of the
    spec's only box, or with the elements of all boxes concatenated in one dimension. spec: its boxes are the index
    ranges of the tensor that this rank has.
    """
    has_box_shape = len(spec.boxes) == 1 and local.shape == spec.boxes[0].shape
    if reference.shape != spec.shape or not (has_box_shape or local.shape == (spec.numel,)):
        return math.inf
    if not (torch.isfinite(local).all() and torch.isfinite(reference).all()):
        return math.inf
    parts = [reference[box.slices].reshape(-1) for box in spec.boxes]
    expected = torch.cat(parts).double() if parts else reference.new_empty(0).double()
    local = local.detach().reshape(-1).double()
    if local.shape != expected.shape:  # a box that reaches beyond the tensor was cut to it
        return math.inf
    if not local.numel():
        return 0.0
    return ((local - expected).abs().max() / (reference.abs().max().double() or 1.0)).item()


def relative_scalar_difference(local: float | None, reference: float) -> float:
    """Return |a - b| / |b| of two numbers, absolute if b is 0; infinite if one is None or non-finite."""
    if local is None or not (math.isfinite(local) and math.isfinite(reference)):
        return math.inf
    return abs(local - reference) / (abs(reference) or 1.0)


@dataclass
class Comparison:
    """Collects the differences between one rank and the reference run, and finds the first beyond its tolerance.

    tolerance: the tolerated relative difference by kind of value (KINDS); a kind without an entry is reported only.
    largest: the largest difference of each kind.
    worst: (difference / tolerance, name) of the tensor where that ratio is largest.
    first: the first difference beyond its tolerance, as ((step, kind, order), "step 0 grad model.norm.weight"); the
    numbers order the differences of all ranks. None if there is none.
    on_first: called with `first` as soon as it is known, since a run that differs may not reach its end.
    """

    tolerance: Mapping[str, float]
    largest: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    worst: tuple[float, str | None] = (-1.0, None)
    first: FirstDifference | None = None
    on_first: Callable[[FirstDifference], None] = lambda first: None
    _seen: int = 0

    def add_difference(self, kind: str, step: int, name: str | None, diff: float) -> None:
        """Add a relative difference between this rank and the reference. kind: one of KINDS. name: of the tensor, if
        any."""
        self._seen += 1
        diff = math.inf if math.isnan(diff) else diff  # max() would ignore a NaN
        self.largest[kind] = max(self.largest[kind], diff)
        if kind not in self.tolerance:
            return
        ratio = diff / self.tolerance[kind]
        if name is not None and ratio > self.worst[0]:
            self.worst = (ratio, name)
        if ratio > 1:
            self._record_first(step, kind, f"step {step} {kind} {name or ''}".rstrip())

    def compare_tensor(
        self, kind: str, step: int, name: str, local: Tensor | None, reference: Tensor | None, spec: ParamSpec
    ) -> None:
        """Compute the `relative_difference` between this rank's shard and the full reference tensor, and add it.

        kind: one of KINDS. local, reference: None for the gradient of an unused parameter. If both are None, the
        difference is 0; if only one is, it is infinite. spec: its boxes are the index ranges of the tensor that this
        rank has.
        """
        if local is not None and reference is not None:
            self.add_difference(kind, step, name, relative_difference(local, reference, spec))
        else:
            self.add_difference(kind, step, name, 0.0 if local is reference else math.inf)

    def record_failure(self, step: int, kind: str, what: str) -> None:
        """Add an infinite difference of this kind, for a failure that has no number. what: describes the failure."""
        self.largest[kind] = math.inf
        self._record_first(step, kind, f"step {step} {what}")

    def _record_first(self, step: int, kind: str, what: str) -> None:
        """Keep this difference if it comes before the first one so far, and report it."""
        order = (step, KINDS.index(kind), self._seen)
        if self.first is None or order < self.first[0]:
            self.first = (order, what)
            self.on_first(self.first)

    def compare_scalar(self, kind: str, step: int, local: float | None, reference: float) -> None:
        """Compute the relative difference between this rank's loss or gradient norm and the reference's, and add it."""
        self.add_difference(kind, step, None, relative_scalar_difference(local, reference))


def has_uncovered_elements(shape: tuple[int, ...], boxes: Iterable[Box]) -> bool:
    """Return whether some element of a tensor of this shape is on no rank. boxes: the index ranges of all ranks."""
    covered = torch.zeros(shape, dtype=torch.bool)
    for box in boxes:
        covered[box.slices] = True
    return not covered.all()
