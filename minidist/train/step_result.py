"""The decision of a step: all ranks clip by the same norm, and step, skip or stop together.

A non-finite loss or gradient, or a request to stop, is known to single ranks only. So one small vector is all-reduced
before the update, and every rank decides from the sums alone; a non-finite summand makes the sum non-finite. No rank
can step while another skips. A run ends if too many consecutive steps are skipped (`SkippedSteps`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from minidist.comm import Group, all_reduce
from minidist.errors import RunError, format_ranks
from minidist.fault.collective_errors import GatherObjects
from minidist.precision.scaler import LossScaler


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step, the same on all ranks except for the last two fields.

    loss: mean token loss of the global batch, without ignored labels, in nats; None if all labels are ignored.
    num_tokens: the number of tokens in that mean, each rank's multiplied by the weight of its data. grad_norm: global
    gradient norm before clipping; NaN if non-finite. update_successful: whether the optimizer updated the parameters.
    is_finite: whether loss and norm were finite. stop_requested: whether any rank asked for the end of the run.
    overflowed: whether scaled gradients overflowed on any rank, so that the step was skipped. checkpoint_written:
    whether all ranks have written their files of the checkpoint in flight. regroup_requested: whether any rank asked to
    continue with more ranks (live recovery).
    is_local_loss_finite: whether the loss of this rank was finite. non_finite_parameters: the names of the parameters
    whose value or gradient is non-finite on this rank, in the order of the model; empty if `is_finite`.
    """

    loss: float | None
    num_tokens: float
    grad_norm: float
    update_successful: bool
    is_finite: bool
    stop_requested: bool
    overflowed: bool = False
    checkpoint_written: bool = False
    regroup_requested: bool = False
    is_local_loss_finite: bool = True
    non_finite_parameters: tuple[str, ...] = ()


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


class SkippedSteps:
    """Counts the steps skipped because the loss or a gradient was not finite, and ends the run after too many.

    limit: the largest number of consecutive skipped steps. scaler: the loss scaler; the steps that it skips for an
    overflow are not counted here. None: no loss scaling. all_gather_object: takes this rank's value and returns the
    values of all ranks. Attributes: total, the number of skipped steps; consecutive, those since the last update;
    last_step, the last step added, which counts once although it is added again after a live recovery.
    """

    def __init__(self, limit: int, scaler: LossScaler | None, all_gather_object: GatherObjects):
        self.total = self.consecutive = self.last_step = 0
        self._limit = limit
        self._scaler = scaler
        self._all_gather_object = all_gather_object

    def add_step(self, result: StepResult, step: int, describe_last_checkpoint: Callable[[], str]) -> str | None:
        """Collective: count the step if it was not finite; then return a line about it for the log, otherwise None.

        step: the number of the step, from 1. describe_last_checkpoint: returns the last sentence of the RunError.
        Raises RunError, which names the first non-finite parameters, if more than `limit` consecutive steps were not
        finite, or the loss scaler's overflows persist.
        """
        is_counted = step == self.last_step
        self.last_step = step
        if is_counted:
            return None
        if result.is_finite:
            self.consecutive = 0
        elif not result.overflowed:
            self.total += 1
            self.consecutive += 1
            found = _describe_not_finite(result, step, self._all_gather_object)
            if self.consecutive <= self._limit:
                return f"{found} The step was skipped ({self.consecutive} of at most {self._limit} in sequence)."
            since = f" in the last {self.consecutive} steps" if self._limit else ""
            advice = "Lower --optim.lr, or clip with --optim.clip-norm."
            raise RunError(f"{found} No parameter was updated{since}. {advice} {describe_last_checkpoint()}")
        elif self._scaler.overflows_persist:
            found = _describe_overflow(result, step, self._scaler, self._all_gather_object)
            raise RunError(found + describe_last_checkpoint())
        return None


def _describe_not_finite(result: StepResult, step: int, all_gather_object: GatherObjects) -> str:
    """Collective: return a sentence that names the first non-finite tensor and the ranks with a non-finite loss."""
    names = [name for names in all_gather_object(result.non_finite_parameters) for name in names[:1]]
    own = [rank for rank, finite in enumerate(all_gather_object(result.is_local_loss_finite)) if not finite]
    where = f"the loss of {format_ranks(own)}" if own else "the reduced gradient"
    return f"step {step}: {where} is not finite; the first tensor that is not: {names[0] if names else 'none'}."


def _describe_overflow(result: StepResult, step: int, scaler: LossScaler, all_gather_object: GatherObjects) -> str:
    """Collective: return sentences about the steps that overflowed: loss scales, parameters, what to change."""
    names = list(dict.fromkeys(name for names in all_gather_object(result.non_finite_parameters) for name in names))
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    scales = [f"{scale:g}" for scale in scaler.overflowed]
    shown_scales = ", ".join(scales if len(scales) <= 6 else [*scales[:3], "...", *scales[-2:]])
    return (
        f"step {step}: gradients overflowed in {len(scales)} steps one after another, at loss scales {shown_scales}; "
        f"in the last, these were not finite: {shown}. Steps {step - len(scales) + 1} to {step} updated nothing. Lower "
        "--optim.lr, or give --precision.policy bf16. "
    )
