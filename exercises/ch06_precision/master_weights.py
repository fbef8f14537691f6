"""Master weights that keep small updates.

Write the missing lines of MasterWeights; its docstring specifies the result.
You may call: torch.zeros_like, Tensor.copy_, Tensor.to, rounding.
Check it with: python -m exercises check master_weights

Stub 82384a8c.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from minidist.precision.dtypes import PrecisionDtypes
from minidist.precision.masters import Rounding


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
        raise NotImplementedError("make `tensor` and `views`: the shard itself, or a copy of the values")
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
        raise NotImplementedError("set each used master weight's gradient, in the dtype of the update")

    @torch.no_grad()
    def copy_to_params(self, step: int = 0) -> None:
        """Bring the updated masters to the part. step: of the optimizer."""
        raise NotImplementedError("copy the master weights to the shard, if they are separate")

    def detach_grads(self) -> None:
        """After an update: give back what it took."""
        for view in self.views.values():
            view.grad = None
        if not self.lasting:
            self.tensor.untyped_storage().resize_(0)
