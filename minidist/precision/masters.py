"""Master weights: what the optimizer updates, where that is wider than what forward and backward read.

An update is often smaller than half a step of a 16-bit weight, and then lost if it is added to it. Added to a copy in
32 bits it counts, and the weight is that copy, rounded, after every step (Micikevicius et al. 2018, arXiv 1710.03740,
section 3.1).
"""

from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from torch import Tensor

from minidist.precision.dtypes import PrecisionDtypes


class Rounding(Protocol):
    """Rounds what an update gave, (n,), into a parameter's elements, (n,), of a narrower format."""

    def __call__(self, values: Tensor, into: Tensor, step: int, name: str) -> None: ...


class MasterWeights:
    """What the optimizer updates of a piece of memory that the model reads: a copy of its own, or the piece itself.

    part: (n,), in the format of the parameters. bounds: which elements of it are a parameter's, by name; the others are
    padding. values: of each parameter, those elements in full precision, (stop - start,). host: whether masters lie in
    the host's memory, where the update runs then. rounding: where masters do not last, how they come back to the part.

    tensor: (n,), all masters; the part itself, unless they are a copy. views: those of each parameter, in one
    dimension. separate: whether they are a copy. lasting: whether it is kept between steps; else it has memory only
    while it is updated.
    """

    def __init__(
        self,
        part: Tensor,
        bounds: Mapping[str, tuple[int, int]],
        values: Mapping[str, Tensor],
        formats: PrecisionDtypes,
        host: bool = False,
        rounding: Rounding | None = None,
    ):
        wide = formats.master or formats.state
        self._part, self._bounds, self._rounding = part, bounds, rounding
        self.separate = host or wide != part.dtype
        self.lasting = formats.master is not None
        self.tensor = part
        if self.separate:
            self.tensor = torch.zeros_like(part, dtype=wide, device="cpu" if host else part.device)
        self.views = {name: self.tensor[start:stop] for name, (start, stop) in bounds.items()}
        if self.separate and self.lasting:
            for name, view in self.views.items():
                view.copy_(values[name])
        if not self.lasting:
            self.tensor.untyped_storage().resize_(0)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """The elements of each parameter, as exact as they are kept."""
        source = self.tensor if self.lasting else self._part
        return {name: source[start:stop] for name, (start, stop) in self._bounds.items()}

    def needs_temporary_memory(self, gradients: Tensor) -> bool:
        """Whether an update takes memory of its own, which one piece after another can share."""
        return not self.lasting or (gradients.dtype, gradients.device) != (self.tensor.dtype, self.tensor.device)

    def attach_grads(self, gradients: Tensor, unused: Collection[str] = ()) -> None:
        """Before an update: give every master its gradient out of `gradients` (n,), in the format of the update.

        unused: parameters that no rank used, which get none.
        """
        if not self.lasting:
            self.tensor.untyped_storage().resize_(self.tensor.numel() * self.tensor.element_size())
            self.tensor.copy_(self._part)
        gradients = gradients.to(self.tensor)  # itself, where format and device are the same
        for name, (start, stop) in self._bounds.items():
            if name not in unused:
                self.views[name].grad = gradients[start:stop]

    @torch.no_grad()
    def copy_to_params(self, step: int = 0) -> None:
        """Bring the updated masters to the part. step: of the optimizer."""
        if not self.separate:
            return
        if self.lasting:
            self._part.copy_(self.tensor)
            return
        for name, (start, stop) in self._bounds.items():
            self._rounding(self.views[name], self._part[start:stop], step, name)

    def detach_grads(self) -> None:
        """After an update: give back what it took."""
        for view in self.views.values():
            view.grad = None
        if not self.lasting:
            self.tensor.untyped_storage().resize_(0)
