"""what_the_scale_is_not_to_blame_for: a loss that is not finite halves the scale"""

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
    overflow = not finite and scaler is not None
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
