"""The distance between what a rank has and what one process had, and the first tensor in which it is too large.

A comparison that takes wrong for right is the worst fault this project can have, so whatever cannot be compared (a
shape that does not fit, a number that is not finite on either side, a tensor that only one side has) is infinitely far.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minidist.parameters import Box, ParamSpec

First = tuple[tuple[int, int, int], str]

# In the order in which one step's are told: the name of a tensor says more than that the loss is wrong.
KINDS = ("grad", "loss", "grad_norm", "param")


def difference(mine: Tensor, whole: Tensor, spec: ParamSpec) -> float:
    """max|a - b| / max|b|: this rank's part `a` against the same part of the reference `b`, over its global maximum.

    mine: of the shape of the spec's only box, or its boxes one after another in one dimension. Absolute where the
    reference is all zero; 0 where this rank holds nothing of the tensor.
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


def scalar_difference(mine: float | None, whole: float) -> float:
    """|a - b| / |b| of two numbers; infinite when one is None or not finite."""
    if mine is None or not (math.isfinite(mine) and math.isfinite(whole)):
        return math.inf
    return abs(mine - whole) / (abs(whole) or 1.0)


@dataclass
class Comparison:
    """The largest difference of each kind that one rank saw, and the first that is beyond its tolerance.

    tolerance: of the kinds that are judged; the others are only reported.
    worst: the tensor whose difference is the largest part of its tolerance.
    first: what is wrong first: its place (step, kind, order seen) and "step 0 grad model.norm.weight".
    found: called when that is known, since a wrong run may not live to its end.
    """

    tolerance: Mapping[str, float]
    largest: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    worst: tuple[float, str | None] = (-1.0, None)
    first: First | None = None
    found: Callable[[First], None] = lambda first: None
    _seen: int = 0

    def see(self, kind: str, step: int, name: str | None, diff: float) -> None:
        """Take one difference into account; `name` is that of a tensor, None for a number."""
        self._seen += 1
        diff = math.inf if math.isnan(diff) else diff  # a nan is larger than nothing, and would vanish in max()
        self.largest[kind] = max(self.largest[kind], diff)
        if kind not in self.tolerance:
            return
        part = diff / self.tolerance[kind]
        if name is not None and part > self.worst[0]:
            self.worst = (part, name)
        if part > 1:
            self._wrong(step, kind, f"step {step} {kind} {name or ''}".rstrip())

    def see_tensor(
        self, kind: str, step: int, name: str, mine: Tensor | None, whole: Tensor | None, spec: ParamSpec
    ) -> None:
        """A tensor that may be None (a parameter nobody used), on either side."""
        if mine is not None and whole is not None:
            self.see(kind, step, name, difference(mine, whole, spec))
        else:
            self.see(kind, step, name, 0.0 if mine is whole else math.inf)

    def refuse(self, step: int, kind: str, what: str) -> None:
        """Something is wrong that has no size."""
        self.largest[kind] = math.inf
        self._wrong(step, kind, f"step {step} {what}")

    def _wrong(self, step: int, kind: str, what: str) -> None:
        place = (step, KINDS.index(kind), self._seen)
        if self.first is None or place < self.first[0]:
            self.first = (place, what)
            self.found(self.first)

    def see_number(self, kind: str, step: int, mine: float | None, whole: float) -> None:
        """A number that every rank knows."""
        self.see(kind, step, None, scalar_difference(mine, whole))


def not_held(shape: tuple[int, ...], boxes: Iterable[Box]) -> bool:
    """Whether some element of a tensor is in none of the boxes that the ranks together hold of it."""
    held = torch.zeros(shape, dtype=torch.bool)
    for box in boxes:
        held[box.slices] = True
    return not held.all()
