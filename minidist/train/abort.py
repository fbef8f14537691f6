"""Why a run ends: a number that is not finite, which no step can take. The messages name what was wrong first."""

from collections.abc import Callable

from minidist.errors import RunError, format_ranks
from minidist.fault.agree import GatherObjects
from minidist.precision.scaler import LossScaler
from minidist.train.agree import StepResult


def check(
    result: StepResult, step: int, scaler: LossScaler | None, swap: GatherObjects, last: Callable[[], str]
) -> None:
    """Raise RunError, the same on all ranks, when the run cannot go on after this step.

    step: its number, from 1; swap: takes this rank's value, returns those of all ranks; last: says which checkpoint
    is the last. All ranks call it.
    """
    if not result.finite and not result.overflow:
        raise RunError(_not_finite(result, step, swap) + last())
    if result.overflow and scaler.exhausted:
        raise RunError(_overflow(result, step, scaler, swap) + last())


def _not_finite(result: StepResult, step: int, swap: GatherObjects) -> str:
    names = [name for names in swap(result.not_finite) for name in names[:1]]
    own = [rank for rank, finite in enumerate(swap(result.own_loss_finite)) if not finite]
    where = f"the loss of {format_ranks(own)}" if own else "the reduced gradient"
    return (
        f"step {step}: {where} is not finite; the first tensor that is not: {names[0] if names else 'none'}. No "
        "parameter was updated. Lower --optim.lr, or clip with --optim.clip-norm. "
    )


def _overflow(result: StepResult, step: int, scaler: LossScaler, swap: GatherObjects) -> str:
    names = list(dict.fromkeys(name for names in swap(result.not_finite) for name in names))
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    scales = [f"{scale:g}" for scale in scaler.overflowed]
    shown_scales = ", ".join(scales if len(scales) <= 6 else [*scales[:3], "...", *scales[-2:]])
    return (
        f"step {step}: gradients overflowed in {len(scales)} steps one after another, at loss scales {shown_scales}; "
        f"in the last, these were not finite: {shown}. Steps {step - len(scales) + 1} to {step} updated nothing. Lower "
        "--optim.lr, or give --precision.policy bf16. "
    )
