"""Master weights that keep small updates.

A 16-bit weight loses every update that is smaller than half the distance to the next number. Write the function that
converts a model and keeps fp32 copies, which the optimizer updates, and the one that copies their new values back.

make_masters(model, dtype): every parameter of the model gets `dtype`, and stays the same Parameter; whether its memory
is the same does not matter. The result has a master of each parameter that requires a gradient, by name. With a 16-bit
dtype it is an fp32 copy of the value before the conversion, in the parameter's shape; with float32 or float64 it is the
converted parameter itself.
copy_to_parameters(masters, parameters): overwrites the values of `parameters`, in place. `masters` may have more names.
Example: bf16 has 1.0 and 1.0078125, and nothing between. With model.weight = [1.001] and model.bias = [0.5]
    masters = make_masters(model, torch.bfloat16)
    masters["weight"], model.weight   are [1.001] in fp32 and [1.0] in bf16
    with torch.no_grad(): masters["weight"] += 0.003
    copy_to_parameters(masters, {"weight": model.weight})
    masters["weight"], model.weight   are [1.004] and [1.0078125]; bias has not changed

Checked: dtypes, shapes and values of masters and parameters, for models in float32, float64 and bf16; frozen and tied
parameters; buffers unchanged; that masters share no memory with 16-bit parameters; parameters over 200 updates by SGD
against float64; that a view of a parameter sees the copied values; and memory: 6 bytes per element after
make_masters, and at most 4 more, of one parameter at a time, in copy_to_parameters; and values in other memory
layouts, some of them NaN.

You may call:
    named_parameters(model)   {name: Parameter} in the order of the model; a tied parameter once, under its first name
    parameter.data   the values, a tensor without gradients; `parameter.data = tensor` gives it other values or dtype
    Tensor.detach(), Tensor.clone(), Tensor.to(dtype, copy=False)   copy=True: a new tensor also if the dtype is equal
    Tensor.copy_(tensor)   overwrites the values in place, and rounds to nearest where this tensor's dtype is narrower
    torch.no_grad()   as a context: inside, tensors that require gradients may be overwritten
    torch.promote_types(a, b)   the narrowest dtype with the numbers of both: float32 for bfloat16 and float32

Check it with: python -m exercises check master_weights

Stub bba0747b.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from minidist.parameters import named_parameters


def copy_to_parameters(masters: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Copy to each of `parameters` the master of its name, which rounds it to the parameter's dtype, in place."""
    raise NotImplementedError("round the masters into the parameters")


def make_masters(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Convert a model's parameters to `dtype`, in place; return what the optimizer is to update, by name.

    These masters are float32 copies of the original values, or the parameters themselves if `dtype` is not narrower. An
    update of 1e-4 to a weight of 1 is lost in bf16, whose numbers near 1 are 0.0078 apart.
    """
    raise NotImplementedError("convert the parameters, and return their masters")
