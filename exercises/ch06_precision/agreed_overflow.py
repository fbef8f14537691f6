"""Skip a step on all ranks or on none.

Write the missing lines of agree; its docstring specifies the result.
You may call: torch.tensor, all_reduce, Handle.wait, Tensor.tolist, math.isfinite, scaler.update.
Check it with: python -m exercises check agreed_overflow

Stub 3bd82c10.
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
