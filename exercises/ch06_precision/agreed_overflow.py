"""Skip a step on all ranks or on none.

Write the missing lines of agree; its docstring specifies the result.
You may call: torch.tensor, all_reduce, Handle.wait, Tensor.tolist, math.isfinite, scaler.update.
Check it with: python -m exercises check agreed_overflow

Stub be33e793.
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
    """Sum one vector over the group and decide. Returns the decision, and the sums of the reports.

    loss, squared_norm, stop, reports: of this rank; squared_norm: of the elements that count on it. tokens: of the
    global batch, the same on all ranks; at 0 nothing is updated. scaler: of a scaled loss, which learns how it went.
    """
    raise NotImplementedError("sum one vector over the group, and decide from the sums")
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
