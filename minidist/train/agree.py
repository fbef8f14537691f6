"""The decision of a step: all ranks clip alike and step, skip or stop together.

Whether a loss or a gradient was finite, and whether somebody wants to stop, is known to single ranks. One small vector
is summed over all of them before the first parameter is written. Every rank decides from that sum and from nothing of
its own, so none can step while another skips. A number that is not finite makes the sum so.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minidist.comm import Group, all_reduce
from minidist.precision.scaler import LossScaler


@dataclass(frozen=True)
class StepResult:
    """What every rank knows of a step, equal on all of them.

    loss: mean over the counted tokens of the global batch, in nats; None when no token counted.
    tokens: how many counted; grad_norm: global norm before clipping.
    applied: whether the parameters were updated; finite: whether loss and norm were finite.
    overflow: whether the scaled gradients of any rank were too large for their format, so that the step was skipped.
    stop: whether any rank asked for it.
    own_loss_finite, not_finite: of this rank alone, when something was not finite: whether its own loss was, and the
    names of its parameters whose gradient or value was not, in the order of the model.
    """

    loss: float | None
    tokens: float
    grad_norm: float
    applied: bool
    finite: bool
    stop: bool
    overflow: bool = False
    own_loss_finite: bool = True
    not_finite: tuple[str, ...] = ()


def agree(
    loss: float,
    squared_norm: float,
    stop: bool,
    reports: Sequence[float],
    tokens: float,
    scaler: LossScaler | None,
    group: Group,
) -> tuple[StepResult, list[float]]:
    """Sum one vector over the group and decide. Returns the decision, and the sums of the reports.

    loss, squared_norm, stop, reports: of this rank; squared_norm: of the elements that count on it. tokens: of the
    global batch, the same on all ranks; at 0 nothing is updated. scaler: of a scaled loss, which learns how it went.
    """
    mine = [loss, squared_norm, float(stop), *reports]
    vector = torch.tensor(mine, dtype=torch.float64, device=group.world.control_device)
    all_reduce(vector, group, async_op=True).wait(host=True)
    total, square, stops, *sums = vector.tolist()
    finite = math.isfinite(total) and math.isfinite(square)
    # A loss that is not finite has another cause than the scale, and no smaller scale mends it.
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
