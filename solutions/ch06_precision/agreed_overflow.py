"""Skip a step on all ranks or on none: the solution, as it stands in minidist.train.agree.

A rank must not decide alone from values that only this rank has. All-reduced gradients are equal on all ranks, and so
is an infinity in them; but gradient shards are not, and neither are the shards of a tensor-parallel or pipelined
model: there only one rank sees that its gradients overflowed. If only that rank skips the step, the replicas diverge
from then on, and if only that rank halves its scale, later gradient sums mix two scales.

A non-finite value makes every sum non-finite, so the gradient norm, which the step needs anyway, detects an overflow
at no extra cost: one message of a few dozen bytes before any parameter is updated. The vector is float64 because the
squares of norms can exceed float32's range. An infinite loss is not an overflow of the scaled gradients: no smaller
scale fixes it, and a run that only halves the scale would hide the cause.

Usual wrong answers:
* one message per number
* the package's own
* the step is always good
* a step without tokens counts as a good one for the scale
* every rank gathers the pickled values of all ranks
* sends the overflow flag in a separate message
* a float32 vector, in which a finite square may become infinite
* the maximum over ranks instead of the sum
* on the last rank, the scaler is updated with the previous step
* the rank with the overflow sends nothing, and the others wait
* a non-finite loss halves the scale
* a non-finite loss does not skip the step
* averages the loss over ranks, although each rank holds a summand
* tests for infinity only, but inf - inf is NaN
* updates the scaler on overflows only, never on good steps
* reports an overflow although there is no scaler
* only the rank that was asked to stop stops
* only the overflow of rank 0 counts
* all ranks skip, but only the rank with the overflow halves its scale
* only the rank with the overflow skips the step
* updates the scaler once per rank in a good step
* sums nothing
"""

import math
from collections.abc import Sequence

import torch

from minidist.comm import Group, all_reduce
from minidist.precision.scaler import LossScaler
from minidist.train.agree import StepResult


def agree_on_step(
    loss: float,
    squared_norm: float,
    stop_requested: bool,
    extra_values: Sequence[float],
    tokens: float,
    scaler: LossScaler | None,
    group: Group,
) -> tuple[StepResult, list[float]]:
    """Collective: make one decision for all ranks: step, skip or stop. Return it, and the sums of `extra_values`.

    All-reduces one vector over the group: this rank's loss, squared_norm, stop_requested and extra_values (any numbers
    whose sums over the ranks the caller needs). squared_norm: the sum of squares of the gradient elements that this
    rank counts; each element is counted by one rank. tokens: number of tokens in the loss of the global batch, the same
    on all ranks; if 0, the step is skipped. scaler: the loss scaler, which learns whether this step overflowed; None
    without one.
    """
    mine = [loss, squared_norm, float(stop_requested), *extra_values]
    vector = torch.tensor(mine, dtype=torch.float64, device=group.world.control_device)
    all_reduce(vector, group, async_op=True).wait(host=True)
    total, square, stops, *sums = vector.tolist()
    finite = math.isfinite(total) and math.isfinite(square)
    # A non-finite loss is not caused by the scale, so a smaller scale would not help.
    overflow = not finite and scaler is not None and math.isfinite(total)
    if scaler is not None and tokens > 0:
        scaler.update(overflow)
    result = StepResult(
        loss=total if tokens else None,
        num_tokens=tokens,
        grad_norm=math.sqrt(square) if finite else math.nan,
        update_successful=finite and tokens > 0,
        is_finite=finite,
        stop_requested=stops > 0,
        overflowed=overflow,
        is_local_loss_finite=math.isfinite(loss),
    )
    return result, sums
