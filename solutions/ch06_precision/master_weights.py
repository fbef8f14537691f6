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
* copies although the parameters already have the masters' dtype
* masters are float32, whatever the policy
* the package's own
* masters that are 1 everywhere
* truncates instead of rounding to the nearest
* copies only the first parameter back
* copies gradients that already have the right dtype
* gives every parameter the gradient from the start of the shard
* gradients keep their own dtype
* updates the masters but never the parameters
* initializes the masters from the rounded parameters
* concatenates the parameters without the padding between them
* reads the masters back from the rounded parameters after each update
* reads the masters back from the rounded parameters before each update
* gradients are cast to the dtype of the parameters before the reduction
* rounds masters that do not last to the nearest, without `rounding`
* does not pass the step to `rounding`, which then rounds equally in all steps
* the optimizer updates the parameters themselves, without a copy
* keeps the values in addition to the masters
* an unused parameter gets a gradient of zeros
* the views are copies, so the updated values are not copied back
* masters start as zeros
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from minidist.precision.dtypes import PrecisionDtypes
from minidist.precision.masters import RoundingFunction


class MasterWeights:
    """The masters of a flat buffer of parameters: a wider copy of the buffer, or the buffer itself.

    params: (n,), the flat buffer, in the parameters' dtype. bounds: (start, stop) of each parameter in it, by name; the
    rest is padding. values: each parameter's initial masters in full precision, (stop - start,), by name. dtypes: if
    `dtypes.master` is None, masters are not kept between steps: every update makes them from `params`, in the dtype of
    the optimizer states. offload: keep the masters in host memory and update them there. rounding: rounds such
    temporary masters into `params` after an update; not used if masters are kept.

    tensor: (n,), all masters; `params` itself unless `separate`. views: each parameter's slice of it, 1-D, by name.
    separate: whether the masters are a copy. persistent: whether they are kept between steps; otherwise they occupy
    memory only during an update.
    """

    def __init__(
        self,
        params: Tensor,
        bounds: Mapping[str, tuple[int, int]],
        values: Mapping[str, Tensor],
        dtypes: PrecisionDtypes,
        offload: bool = False,
        rounding: RoundingFunction | None = None,
    ):
        dtype = dtypes.master or dtypes.state
        self._params, self._bounds, self._rounding = params, bounds, rounding
        self.separate = offload or dtype != params.dtype
        self.persistent = dtypes.master is not None
        self.tensor = params
        if self.separate:
            self.tensor = torch.zeros_like(params, dtype=dtype, device="cpu" if offload else params.device)
        self.views = {name: self.tensor[start:stop] for name, (start, stop) in bounds.items()}
        if self.separate and self.persistent:
            for name, view in self.views.items():
                view.copy_(values[name])
        if not self.persistent:
            self.tensor.untyped_storage().resize_(0)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return each parameter's elements, 1-D, by name: the masters if they are kept, else the parameters."""
        source = self.tensor if self.persistent else self._params
        return {name: source[start:stop] for name, (start, stop) in self._bounds.items()}

    def needs_temporary_memory(self, gradients: Tensor) -> bool:
        """Return whether an update allocates temporary memory, so that flat buffers should be updated one at a time.

        gradients: (n,), as for `attach_grads`; only their dtype and device matter.
        """
        return not self.persistent or (gradients.dtype, gradients.device) != (self.tensor.dtype, self.tensor.device)

    def attach_grads(self, gradients: Tensor, unused: Collection[str] = ()) -> None:
        """Set `.grad` of every master to its slice of `gradients` (n,), in the masters' dtype and device.

        unused: parameters that no rank used in this step; their masters get no gradient.
        """
        if not self.persistent:
            self.tensor.untyped_storage().resize_(self.tensor.numel() * self.tensor.element_size())
            self.tensor.copy_(self._params)
        gradients = gradients.to(self.tensor)  # no copy if dtype and device agree
        for name, (start, stop) in self._bounds.items():
            if name not in unused:
                self.views[name].grad = gradients[start:stop]

    @torch.no_grad()
    def copy_to_params(self, step: int = 0) -> None:
        """Copy the updated masters to the parameters, rounded to their dtype. step: seed of stochastic rounding."""
        if not self.separate:
            return
        if self.persistent:
            self._params.copy_(self.tensor)
            return
        for name, (start, stop) in self._bounds.items():
            self._rounding(self.views[name], self._params[start:stop], step, name)

    def detach_grads(self) -> None:
        """Drop the masters' gradients after an update, and free masters that are not persistent."""
        for view in self.views.values():
            view.grad = None
        if not self.persistent:
            self.tensor.untyped_storage().resize_(0)
