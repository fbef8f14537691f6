"""Master weights that keep small updates: the solution, as it stands in minidist.precision.masters.

A weight in bfloat16 has eight significant bits, so its smallest change is 1/256 to 1/128 of its value. Late in
training an update is about a thousandth of its weight, and rounding would discard each one, although a thousand of
them double the weight. The master weights accumulate the updates, and the parameters for forward and backward are
rounded from them once per step. The rounding errors do not accumulate, because the master weights are never
overwritten by rounded values. That is why they are initialized with the values before rounding, and why nothing is
copied back from the parameters.

Gradients may have a narrow dtype: they are used once. Tensors that persist from step to step need a wide one: the
master weights and the optimizer states. If the parameters are already wide, separate master weights would waste
memory.

Usual wrong answers:
* masters are a copy where the parameters have their format already
* masters are float32, whatever is asked
* the package's own
* masters that are 1 everywhere
* lower bits are cut off, so that parameters are not the nearest to their masters
* only the first parameter is published
* gradients are copied where they have the right format
* every parameter has its gradient from the start of the row
* gradients keep the format that they came in
* masters learn, and the model goes on with the parameters it began with
* masters are made of the parameters, which have been rounded already
* the parameters are concatenated without the padding between them
* after each update the masters are made of the rounded parameters again
* before each update the masters are made of the rounded parameters
* gradients are cast to the dtype of the parameters before the reduction
* masters that do not last are rounded to the nearest
* the rounding is not told which step it is, and rounds alike in all of them
* the optimizer updates what the model reads, and there is no copy
* the values are kept beside the masters
* a parameter that nobody used gets a gradient of zeros
* views are copies, so that what is updated is not what is published
* masters begin as zeros, and nothing comes of updates
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from minidist.precision.dtypes import PrecisionDtypes
from minidist.precision.masters import Rounding


class MasterWeights:
    """The masters of a flat buffer of parameters: a wider copy of the buffer, or the buffer itself.

    part: (n,), the flat buffer, in the parameters' dtype. bounds: (start, stop) of each parameter in it, by name; the
    rest is padding. values: each parameter's elements in full precision, (stop - start,). host: keep the masters in
    host memory and update them there (offload). rounding: writes updated masters back if they are not lasting.

    tensor: (n,), all masters; `part` itself unless `separate`. views: each parameter's slice of it, 1-D, by name.
    separate: whether the masters are a copy. lasting: whether they are kept between steps; otherwise they have memory
    only during an update.
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
        """Return each parameter's elements, by name: the masters if they are lasting, else the parameters."""
        source = self.tensor if self.lasting else self._part
        return {name: source[start:stop] for name, (start, stop) in self._bounds.items()}

    def needs_temporary_memory(self, gradients: Tensor) -> bool:
        """Return whether an update allocates temporary memory, so that buffers should be updated one at a time."""
        return not self.lasting or (gradients.dtype, gradients.device) != (self.tensor.dtype, self.tensor.device)

    def attach_grads(self, gradients: Tensor, unused: Collection[str] = ()) -> None:
        """Set `.grad` of every master to its slice of `gradients` (n,), in the masters' dtype and device.

        unused: parameters that no rank used in this step; their masters get no gradient.
        """
        if not self.lasting:
            self.tensor.untyped_storage().resize_(self.tensor.numel() * self.tensor.element_size())
            self.tensor.copy_(self._part)
        gradients = gradients.to(self.tensor)  # no copy if dtype and device agree
        for name, (start, stop) in self._bounds.items():
            if name not in unused:
                self.views[name].grad = gradients[start:stop]

    @torch.no_grad()
    def copy_to_params(self, step: int = 0) -> None:
        """Round the updated masters into the parameters. step: the optimizer step, for stochastic rounding."""
        if not self.separate:
            return
        if self.lasting:
            self._part.copy_(self.tensor)
            return
        for name, (start, stop) in self._bounds.items():
            self._rounding(self.views[name], self._part[start:stop], step, name)

    def detach_grads(self) -> None:
        """Drop the masters' gradients after an update, and free masters that are not lasting."""
        for view in self.views.values():
            view.grad = None
        if not self.lasting:
            self.tensor.untyped_storage().resize_(0)
