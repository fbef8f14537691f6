"""The distance between what a rank has and what one process had, and the first tensor in which it is too large."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minidist.spec import ParamSpec

KINDS = ("loss", "grad", "grad_norm", "param")


def difference(mine: Tensor, whole: Tensor, spec: ParamSpec | None = None) -> float:
    """max|a - b| / max|b|: this rank's part `a` against the same part of the reference `b`, over its global maximum.

    Infinite where one is not finite and the other is; absolute where the reference is all zero.
    """
    mine = mine.detach().double()
    if spec is None:
        theirs = whole.double()
    else:
        theirs = torch.cat([whole[box.slices].reshape(-1) for box in spec.boxes]).double()
        mine = mine.reshape(-1)
    if not mine.numel():
        return 0.0
    if not torch.isfinite(mine).all():
        return math.inf
    return ((mine - theirs).abs().max() / (whole.abs().max().double() or 1.0)).item()


@dataclass
class Comparison:
    """The largest difference of each kind, and the first that is beyond its tolerance.

    tolerance: of the kinds that are judged. worst: the tensor whose difference is the largest part of its tolerance.
    first: what is wrong first, in the order in which a step computes: "step 0 grad model.norm.weight".
    """

    tolerance: dict[str, float]
    largest: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    worst: tuple[float, str] = (-1.0, "")
    first: str | None = None

    def see(self, kind: str, step: int, name: str, diff: float, judged: bool = True) -> None:
        """Take one difference into account."""
        self.largest[kind] = max(self.largest[kind], diff)
        part = diff / self.tolerance[kind]
        if judged and part > self.worst[0]:
            self.worst = (part, name)
        if judged and not part <= 1 and self.first is None:
            self.first = f"step {step} {kind} {name}".rstrip()

    def see_tensor(
        self, kind: str, step: int, name: str, mine: Tensor | None, whole: Tensor | None, spec: ParamSpec, judged: bool = True
    ) -> None:
        """A tensor that may be None (a parameter nobody used), on either side."""
        if mine is None or whole is None:
            diff = 0.0 if mine is whole else math.inf
        else:
            diff = difference(mine, whole, spec)
        self.see(kind, step, name, diff, judged)
