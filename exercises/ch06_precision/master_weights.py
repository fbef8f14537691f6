"""Master weights that keep small updates.

Write the missing lines of MasterWeights; its docstring specifies the result.
You may call: torch.zeros_like, Tensor.copy_, Tensor.to, rounding.
Check it with: python -m exercises check master_weights

Stub e954a5f3.
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
        raise NotImplementedError("make `tensor` and `views`: the shard itself, or a copy of the values")
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
        raise NotImplementedError("set each used master weight's gradient, in the dtype of the update")

    @torch.no_grad()
    def copy_to_params(self, step: int = 0) -> None:
        """Copy the updated masters to the parameters, rounded to their dtype. step: seed of stochastic rounding."""
        raise NotImplementedError("copy the master weights to the shard, if they are separate")

    def detach_grads(self) -> None:
        """Drop the masters' gradients after an update, and free masters that are not persistent."""
        for view in self.views.values():
            view.grad = None
        if not self.persistent:
            self.tensor.untyped_storage().resize_(0)
