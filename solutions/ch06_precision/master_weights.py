"""Master weights that keep small updates: the solution, as it stands in minidist.simple.mixed_precision.

A weight in bfloat16 has eight significant bits, so its smallest change is 1/256 to 1/128 of its value. Late in
training an update is about a thousandth of its weight, and rounding would discard each one, although a thousand of
them double the weight. The master weights accumulate the updates, and the parameters for forward and backward are
rounded from them once per step. The rounding errors do not accumulate, because the master weights are never
overwritten by rounded values. That is why they are initialized with the values before rounding, and why nothing is
copied back from the parameters.

The values are overwritten in place because others refer to the same memory: the gradient hooks know the Parameter,
and tied weights are one tensor. A dtype that is not narrower needs no second copy: the parameter is its own master,
and the rest of the trainer need not know the difference.

Usual wrong answers:
* a frozen parameter requires a gradient after the conversion
* copies the masters with float32 and float64, too
* pairs masters and parameters by their order instead of their names
* the package's own
* masters that are 1 everywhere
* writes into parameter.reshape(-1), which is a copy if the parameter is not contiguous
* leaves out parameters whose dtype is not that of the model's first one
* takes everything but float32 for narrow
* makes a master of each parameter, so that the optimizer decays frozen ones
* converts only parameters that require gradients
* masters in the parameters' dtype
* masters in the dtype of the model: float64 takes twice the memory, and bf16 is no wider than the parameter
* rounds the masters in place on the way
* makes the masters, and leaves the parameters in float32
* converts the whole model, buffers included
* keeps copies wherever the dtype changes, also from float64 to float32
* updates the masters, and never the parameters
* gives the parameter new data instead of overwriting it, and views of it keep the old values
* replaces the model's parameters by new ones, which optimizers and hooks do not know
* makes the masters from the rounded parameters
* replaces the parameter's data by the fp32 master
* reads the masters back from the rounded parameters after each update
* cuts digits off instead of rounding to nearest
* a tied parameter has a master for each of its names, and the last one overwrites the others
* the masters stay connected to the old values, which then take memory for ever
* copies through float64, which takes 8 bytes per element
* masters start as zeros
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from minidist.parameters import named_parameters


def copy_to_parameters(masters: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Copy to each of `parameters` the master of its name, which rounds it to the parameter's dtype, in place."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(masters[name])  # nothing happens if the parameter is its own master


def make_masters(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Convert a model's parameters to `dtype`, in place; return what the optimizer is to update, by name.

    These masters are float32 copies of the original values, or the parameters themselves if `dtype` is not narrower. An
    update of 1e-4 to a weight of 1 is lost in bf16, whose numbers near 1 are 0.0078 apart.
    """
    is_narrow = torch.promote_types(dtype, torch.float32) != dtype
    masters = {}
    for name, parameter in named_parameters(model).items():
        if parameter.requires_grad:
            masters[name] = parameter.detach().to(torch.float32, copy=True) if is_narrow else parameter
        parameter.data = parameter.data.to(dtype)
    return masters
