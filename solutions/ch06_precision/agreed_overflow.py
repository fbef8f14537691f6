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
* a message for each number
* the package's own
* the step is always good
* a step without tokens counts as a good one for the scale
* every rank gets the numbers of all ranks, pickled
* whether something overflowed goes in a message of its own
* the vector is float32, where a square may be infinite that was not
* the largest of all ranks instead of the sum
* on the last rank the scaler is told of the step before
* the rank that has the overflow sends nothing, and the others wait for it
* a loss that is not finite halves the scale
* a loss that is not finite does not keep the ranks from stepping
* the loss is the mean over ranks, though each has its part of a sum
* only infinity is looked for, and inf - inf is none
* the scaler learns of overflows only, and never of a good step
* an overflow where there is no scaler
* only the rank that was asked stops
* only the overflow of rank 0 counts
* all skip, and only the rank that has the overflow halves its scale
* the rank that has the overflow skips the step, and the others do not
* the scaler is told of a good step once for each rank
* nothing is added up
"""

import math
from collections.abc import Sequence

import torch

from minidist.comm import Group, all_reduce
from minidist.precision.scaler import LossScaler
from minidist.train.agree import StepResult


def agree(
    loss: float,
    squared_norm: float,
    stop: bool,
    reports: Sequence[float],
    tokens: float,
    scaler: LossScaler | None,
    group: Group,
) -> tuple[StepResult, list[float]]:
    """All-reduce one vector over the group and decide the step; returns the result, and the sums of `reports`.

    loss, squared_norm, stop, reports: of this rank; squared_norm without elements that another replica counts.
    tokens: of the global batch, the same on all ranks; if 0, nothing is updated. scaler: is updated, if given.
    """
    mine = [loss, squared_norm, float(stop), *reports]
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
        tokens=tokens,
        grad_norm=math.sqrt(square) if finite else math.nan,
        applied=finite and tokens > 0,
        finite=finite,
        stop=stops > 0,
        overflow=overflow,
        own_loss_finite=math.isfinite(loss),
    )
    return result, sums
