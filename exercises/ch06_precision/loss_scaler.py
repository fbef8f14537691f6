"""Dynamic loss scaling.

Write the missing lines of LossScaler; its docstring specifies the result.
You may call: _float32, len, list.append, list.clear, float.
Check it with: python -m exercises check loss_scaler

Stub 48ec9621.
"""

from minidist.config import PrecisionConfig
from minidist.precision.scaler import BACKOFF, GROWTH, _float32


class LossScaler:
    """The dynamic loss scale. Does not import torch.

    scale: factor of this step's loss; a float32 number, as in torch.
    overflowed: the scales of the most recent consecutive steps that overflowed, oldest first.
    """

    def __init__(self, config: PrecisionConfig):
        self.scale = _float32(config.initial_scale)
        self.overflowed: list[float] = []
        self._interval, self._most = config.growth_interval, config.max_overflows
        self._good_steps = 0

    @property
    def exhausted(self) -> bool:
        """Whether `max_overflows` consecutive steps overflowed, so that the scale cannot be the cause."""
        raise NotImplementedError("return whether `_most` consecutive steps overflowed")

    def update(self, overflow: bool) -> None:
        """Adjust the scale after a step. overflow: whether a non-finite gradient on any rank caused a skip."""
        raise NotImplementedError("halve the scale after an overflow, double it after `_interval` good steps")

    def state(self) -> dict:
        """Return the state for a checkpoint, as a JSON object."""
        return {"scale": self.scale, "good_steps": self._good_steps, "overflowed": list(self.overflowed)}

    def load(self, state: dict) -> None:
        """Restore a state that `state()` returned."""
        self.scale, self._good_steps = state["scale"], state["good_steps"]
        self.overflowed = list(state["overflowed"])
