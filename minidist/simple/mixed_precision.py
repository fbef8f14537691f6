"""Mixed precision: 16-bit parameters and activations, and masters in float32, which the optimizer updates.

Micikevicius et al. 2018, arXiv 1710.03740. `make_masters` keeps the wide copies (section 3.1), `LossScaler` keeps small
gradients from underflow in fp16 (section 3.2), and `agree_on_step` makes one decision for all ranks: step or skip.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minidist.comm import Group, all_reduce
from minidist.config import PrecisionConfig
from minidist.parameters import named_parameters

COMPUTE_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_masters(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Convert a model's parameters to `dtype`, in place; return what the optimizer is to update, by name.

    These masters are float32 copies of the original values, or the parameters themselves if `dtype` is not narrower. An
    update of 1e-4 to a weight of 1 is lost in bf16, whose numbers near 1 are 0.0078 apart.
    """
    is_narrow = torch.promote_types(dtype, torch.float32) != dtype
    masters = {}
    for name, parameter in named_parameters(model).items():
        if parameter.requires_grad:
            masters[name] = parameter.detach().to(torch.float32, copy=True) if is_narrow else parameter
        parameter.data = parameter.data.to(dtype)
    return masters


def copy_to_parameters(masters: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Copy to each of `parameters` the master of its name, which rounds it to the parameter's dtype, in place."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(masters[name])  # nothing happens if the parameter is its own master


class LossScaler:
    """The loss scale: a power of two, as large as possible without overflow, so scaling is exact.

    scale: multiply the loss by it before backward, and divide the summed gradients by it. overflowed: the scales of the
    latest consecutive steps that overflowed, oldest first.
    """

    def __init__(self, config: PrecisionConfig):
        self.scale = float(config.initial_scale)
        self.growth_interval, self.max_overflows = config.growth_interval, config.max_overflows
        self.good_steps = 0
        self.overflowed: list[float] = []

    @property
    def overflows_persist(self) -> bool:
        """Whether so many consecutive steps overflowed that the scale cannot be the cause."""
        return len(self.overflowed) >= self.max_overflows

    def update(self, overflow: bool) -> None:
        """Halve the scale after an overflow; double it after `growth_interval` consecutive steps without one."""
        if overflow:
            self.overflowed.append(self.scale)
            self.scale /= 2
            self.good_steps = 0
            return
        self.overflowed = []
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.good_steps = 0
            self.scale = min(self.scale * 2, 2.0**127)  # the largest power of two in float32

    def state_dict(self) -> dict:
        """Return all that later steps depend on, as a JSON object."""
        return {"scale": self.scale, "good_steps": self.good_steps, "overflowed": list(self.overflowed)}

    def load_state_dict(self, state: dict) -> None:
        """Restore what `state_dict` returned."""
        self.scale, self.good_steps = state["scale"], state["good_steps"]
        self.overflowed = list(state["overflowed"])


@dataclass(frozen=True)
class Decision:
    """All ranks' decision about a step.

    loss: mean token loss of the global batch in nats; None if all labels are ignored. num_tokens: the number of tokens
    in that mean, each rank's multiplied by the weight of its data. grad_norm: of the global gradient, before clipping;
    NaN if it is not finite. update_successful: whether all ranks update their parameters; otherwise none does.
    is_finite: whether loss and norm are finite. overflowed: whether scaled gradients overflowed on any rank.
    stop_requested: whether any rank asks to end the run.
    """

    loss: float | None
    num_tokens: float
    grad_norm: float
    update_successful: bool
    is_finite: bool
    overflowed: bool
    stop_requested: bool


def agree_on_step(
    loss: float, squared_norm: float, stop_requested: bool, num_tokens: float, scaler: LossScaler | None, group: Group
) -> Decision:
    """Collective: make one decision for all ranks, before the first of them has written a parameter.

    loss, squared_norm: this rank's parts of the global batch's loss and of the squared gradient norm. stop_requested:
    whether this rank asks to end the run. num_tokens: in the global batch; 0 skips the step. group: all ranks.
    """
    vector = torch.tensor([loss, squared_norm, stop_requested], dtype=torch.float64, device=group.world.control_device)
    all_reduce(vector, group)
    total, square, stops = vector.tolist()
    is_finite = math.isfinite(total) and math.isfinite(square)
    decision = Decision(
        loss=total if num_tokens else None,
        num_tokens=num_tokens,
        grad_norm=math.sqrt(square) if is_finite else math.nan,
        update_successful=is_finite and num_tokens > 0,
        is_finite=is_finite,
        overflowed=scaler is not None and math.isfinite(total) and not is_finite,
        stop_requested=stops > 0,
    )
    if scaler is not None and num_tokens > 0 and math.isfinite(total):
        scaler.update(decision.overflowed)  # a smaller scale cannot mend a loss that is not finite
    return decision
