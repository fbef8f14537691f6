"""Master weights: the wider copies of the parameters that the optimizer updates.

An update is often smaller than half the spacing of 16-bit numbers around its weight, and is then lost if it is added to
a 16-bit weight. So it is added to a 32-bit master, which is rounded to the 16-bit weight after every step (Micikevicius
et al. 2018, arXiv 1710.03740, section 3.1).
"""

from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from torch import Tensor

from minidist.precision.dtypes import PrecisionDtypes


class RoundingFunction(Protocol):
    """The type of a function that rounds updated masters `values` (n,) into parameter elements `into` (n,), in place.

    step: number of the optimizer step. name: global name of the parameter.
    """

    def __call__(self, values: Tensor, into: Tensor, step: int, name: str) -> None: ...


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
        self._params = params
        self._bounds = bounds
        self._rounding = rounding
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
