"""One decision for all ranks: step or skip.

After backward each rank knows its own part of the loss and of the gradient norm, and sees overflows in its own
gradients only. Write the decision that ends an fp16 step: after one all-reduce every rank knows whether all update.

The global loss and the squared norm are the sums of the ranks' parts; an overflow makes a part of the squared norm
infinite or NaN. num_tokens and scaler are equal on all ranks. scaler is None if the loss is not scaled; then no step
counts as an overflow. The result is a Decision, equal on all ranks. grad_norm is NaN unless both sums are finite.
Without tokens loss is None and no rank updates; the other fields follow the same rules. The scaler learns of each step
with tokens and a finite loss whether it overflowed. If the loss is not finite, a smaller scale would not help: that
step counts as no overflow, either.
Example: 2 ranks with the losses 1.5 and 0.75, the squared norms 9.0 and 16.0, 8 tokens, and the scale 64
    Decision(loss=2.25, num_tokens=8.0, grad_norm=5.0, update_successful=True, is_finite=True, overflowed=False,
             stop_requested=False)
    With inf instead of 16.0: loss=2.25, grad_norm=nan, update_successful=False, is_finite=False, overflowed=True,
    and both scales become 32. With loss=nan on one rank, overflowed=False, and both scales stay 64.

Checked: every field on 1 to 4 ranks, for infinity and NaN of each rank in turn, norms of 1e140, parts that float32
rounds, requests to stop, steps with 0 and 0.5 tokens, with and without scaler; each scaler's scale and its good steps;
one all-reduce of at most four float64 numbers per step, and an unchanged scaler if it fails; and masters,
parameters and momenta over nine steps of a training loop that follows your decision, equal bit for bit after a skip.

You may call:
    all_reduce(tensor, group, "sum")   replaces each element by the sum over all ranks; CommError if a rank is gone
    torch.tensor(numbers, dtype=torch.float64, device=group.world.control_device), Tensor.tolist()
    math.isfinite(number), math.sqrt(number), math.nan
    scaler.update(overflow: bool)   halves the scale after an overflow, doubles it after enough steps without one

Check it with: python -m exercises check step_decision

Stub d7fda0e6.
"""

import math

import torch

from minidist.comm import Group, all_reduce
from minidist.simple.mixed_precision import Decision, LossScaler


def agree_on_step(
    loss: float, squared_norm: float, stop_requested: bool, num_tokens: float, scaler: LossScaler | None, group: Group
) -> Decision:
    """Collective: make one decision for all ranks, before the first of them has written a parameter.

    loss, squared_norm: this rank's parts of the global batch's loss and of the squared gradient norm. stop_requested:
    whether this rank asks to end the run. num_tokens: in the global batch; 0 skips the step. group: all ranks.
    """
    raise NotImplementedError("sum over the ranks, then decide from the sums alone")
