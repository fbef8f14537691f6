"""Skip a step on all ranks or on none.

Write the missing lines of agree_on_step; its docstring specifies the result.
You may call: torch.tensor, all_reduce, Handle.wait, Tensor.tolist, math.isfinite, scaler.update.
Check it with: python -m exercises check agreed_overflow

Stub 5f60cf2a.
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
    raise NotImplementedError("sum one vector over the group, and decide from the sums")
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
