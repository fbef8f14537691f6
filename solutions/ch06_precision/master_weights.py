"""Master weights that keep small updates: the solution, as it stands in minidist.precision.simple.

A weight in bfloat16 has eight significant bits, so its smallest change is 1/256 to 1/128 of its value. Late in
training an update is about a thousandth of its weight, and rounding would discard each one, although a thousand of
them double the weight. The master weights accumulate the updates, and the parameters for forward and backward are
rounded from them once per step. The rounding errors do not accumulate, because the master weights are never
overwritten by rounded values. That is why they are initialized with the values before rounding, and why nothing is
copied back from the parameters.

Rounding to nearest has the same error in every step until the master has moved far enough. Stochastic rounding has
another error in each step, and no error on average: the parameters of many steps average to the masters. With it a
run can even do without masters, as the next section but one shows.

Usual wrong answers:
* adds noise of a fixed size to the value instead of its bits
* adds the gradients to those of the previous step
* the package's own
* masters that are 1 everywhere
* divides in the gradients' dtype, in which the quotient may be 0, and converts afterwards
* divides the given gradient in place if it is fp32 already
* rounds up or down with equal chances
* rounds the parameters to nearest although a generator was given
* draws from torch's global generator, not from the given one
* 15 random bits: no value below the middle is ever rounded up
* keeps an iterator of the parameters, which is used up after the first copy
* does not clear the lower half, so the conversion rounds a second time
* masters in the parameters' dtype
* masters in float64, twice the memory that is needed
* keeps the rounded values as masters
* adds noise to NaN as well, which become infinities or zeros
* the gradient is rounded to bf16, which an fp32 master refuses
* updates the masters, and never the parameters
* does not divide by the scale
* makes the masters from the rounded parameters
* draws one random number for all elements, which are then all rounded up or all down
* copies only the first parameter
* replaces the parameter's data by the fp32 master
* reads the masters back from the rounded parameters after each update
* rounds to nearest, whatever the noise
* makes a new generator of the same seed for each step
* cuts digits off instead of rounding to nearest
* keeps another copy of the values beside the masters
* the masters are the given tensors, which then change with every update
* masters start as zeros
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round fp32 `values` to bf16, up or down at random, so that the expected result is the value (arXiv 1502.02551).

    Values that bf16 represents are unchanged, also infinities and NaN. generator: of the random numbers.
    """
    noise = torch.randint(1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    # A bf16 number is the upper half of an fp32 number: the sum carries into it with just the right probability.
    upper = (values.view(torch.int32) + noise) & ~0xFFFF
    return torch.where(values.isfinite(), upper.view(torch.float32), values).to(torch.bfloat16)


class MasterWeights:
    """The fp32 copies of 16-bit parameters, which the optimizer updates in their place (arXiv 1710.03740, section 3.1).

    parameters: 16-bit tensors of any shapes, which the model reads. values: their fp32 values before they were rounded,
    in the same order. generator: round stochastically, to bf16, with its numbers; None: round to nearest.
    masters: the fp32 copies, in the same order; they share no memory with `values`.
    """

    def __init__(
        self, parameters: Iterable[Tensor], values: Iterable[Tensor], generator: torch.Generator | None = None
    ):
        self.masters = [value.detach().clone() for value in values]
        self._parameters, self._generator = list(parameters), generator

    def attach_grads(self, gradients: Iterable[Tensor], scale: float = 1.0) -> None:
        """Set the `.grad` of each master to its gradient, converted to fp32 and then divided by `scale`."""
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient.to(torch.float32) / scale

    @torch.no_grad()
    def copy_to_params(self) -> None:
        """Overwrite the parameters with the rounded masters; the masters keep their values."""
        for parameter, master in zip(self._parameters, self.masters, strict=True):
            parameter.copy_(master if self._generator is None else round_stochastically(master, self._generator))
