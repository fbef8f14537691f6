"""The decision of a step: all ranks clip by the same norm, and step, skip or stop together.

A non-finite loss or gradient, or a request to stop, is known to single ranks only. So one small vector is all-reduced
before the update, and every rank decides from the sums alone; a non-finite summand makes the sum non-finite. No rank
can step while another skips.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minidist.comm import Group, all_reduce
from minidist.precision.scaler import LossScaler


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step, the same on all ranks except for the last two fields.

    loss: mean over the tokens of the global batch without ignored labels, in nats; None if there are none.
    tokens: their weighted number. grad_norm: global norm before clipping.
    applied: whether the parameters were updated. finite: whether loss and norm were finite.
    overflow: whether scaled gradients overflowed on any rank, so that the step was skipped.
    stop: whether any rank requested a stop.
    own_loss_finite, not_finite: of this rank only: whether its loss was finite, and the names of its parameters with a
    non-finite gradient or value, in the order of the model.
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
