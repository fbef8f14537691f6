"""Master weights that keep small updates.

A 16-bit weight loses updates that are smaller than half the distance to the next number. Write the fp32 copies that the
optimizer updates instead, and two ways to round them into the parameters: to nearest, and at random.

parameters and values: tensors of equal shapes, in 16 bits and in fp32. After attach_grads(gradients, scale), any torch
optimizer of `masters` can step. round_stochastically(values, generator): a bf16 tensor of the shape of the fp32 values.
Example: bf16 has 1.0 and 1.0078125, and nothing between.
    weights = MasterWeights([torch.ones(1, dtype=torch.bfloat16)], [torch.tensor([1.001])])
    weights.masters   is [tensor([1.001])]; after copy_to_params() the parameter is 1.0
    round_stochastically(torch.tensor([1.001]), generator)   is 1.0078125 in 12.8 % of the calls, otherwise 1.0

Checked: masters, gradients and parameters over 200 updates against float64; dtypes; that nothing shares memory with
`values` or the given gradients; and the rounding by the two neighbours of a value, their frequencies in 20,000 draws
(within five standard deviations), exact values, zeros, infinities, NaN, and equal results from equal generators.

You may call:
    Tensor.to(dtype), Tensor.copy_(tensor)   round to nearest where the dtype is narrower
    torch.randint(1 << 16, shape, dtype=torch.int32, device=device, generator=generator)   random integers of 16 bits
    Tensor.view(torch.int32), Tensor.view(torch.float32)   the same 32 bits read as the other dtype
    torch.where(condition, tensor, other), Tensor.isfinite()

Check it with: python -m exercises check master_weights

Stub c643c01b.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round fp32 `values` to bf16, up or down at random, so that the expected result is the value (arXiv 1502.02551).

    Values that bf16 represents are unchanged, also infinities and NaN. generator: of the random numbers.
    """
    raise NotImplementedError("round up or down at random")


class MasterWeights:
    """The fp32 copies of 16-bit parameters, which the optimizer updates in their place (arXiv 1710.03740, section 3.1).

    parameters: 16-bit tensors of any shapes, which the model reads. values: their fp32 values before they were rounded,
    in the same order. generator: round stochastically, to bf16, with its numbers; None: round to nearest.
    masters: the fp32 copies, in the same order; they share no memory with `values`.
    """

    def __init__(
        self, parameters: Iterable[Tensor], values: Iterable[Tensor], generator: torch.Generator | None = None
    ):
        raise NotImplementedError("make the fp32 copies")

    def attach_grads(self, gradients: Iterable[Tensor], scale: float = 1.0) -> None:
        """Set the `.grad` of each master to its gradient, converted to fp32 and then divided by `scale`."""
        raise NotImplementedError("set the gradients of the masters, in fp32")

    @torch.no_grad()
    def copy_to_params(self) -> None:
        """Overwrite the parameters with the rounded masters; the masters keep their values."""
        raise NotImplementedError("round the masters into the parameters")
