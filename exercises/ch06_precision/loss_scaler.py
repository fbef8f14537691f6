"""Dynamic loss scaling.

Write the missing lines of LossScaler; its docstring specifies the result.
You may call: _float32, len, list.append, list.clear, float.
Check it with: python -m exercises check loss_scaler

Stub 2709ab03.
"""

from minidist.config import PrecisionConfig
from minidist.precision.scaler import BACKOFF, GROWTH, _float32


class LossScaler:
    """The scale of the loss, from step to step. Needs no torch.

    scale: what the loss of this step is multiplied by, a number that float32 has, as torch keeps it.
    overflowed: the scales of the steps skipped since the last that was not, oldest first.
    """

    def __init__(self, config: PrecisionConfig):
        self.scale = _float32(config.initial_scale)
        self.overflowed: list[float] = []
        self._interval, self._most = config.growth_interval, config.max_overflows
        self._good_steps = 0

    @property
    def exhausted(self) -> bool:
        """Whether so many steps in a row overflowed that the scale is no longer the reason."""
        raise NotImplementedError("return whether `_most` consecutive steps overflowed")

    def update(self, overflow: bool) -> None:
        """Learn how a step went. overflow: whether a gradient of any rank was not finite, and the step was skipped."""
        raise NotImplementedError("halve the scale after an overflow, double it after `_interval` good steps in a row")

    def state(self) -> dict:
        """What a checkpoint keeps, as JSON has it."""
        return {"scale": self.scale, "good_steps": self._good_steps, "overflowed": list(self.overflowed)}

    def load(self, state: dict) -> None:
        """Go on from what `state` gave."""
        self.scale, self._good_steps = state["scale"], state["good_steps"]
        self.overflowed = list(state["overflowed"])
