"""Dynamic loss scaling.

Write the missing lines of LossScaler; its docstring specifies the result.
You may call: _float32, len, list.append, list.clear, float.
Check it with: python -m exercises check loss_scaler

Stub 3e380a72.
"""

import math
from typing import Any

from minidist.config import PrecisionConfig
from minidist.precision.scaler import BACKOFF, GROWTH, _float32


class LossScaler:
    """The dynamic loss scale, for gradients that would underflow in fp16.

    scale: the factor of this step's loss; a float32 number, as in torch. overflowed: the loss scales of the latest
    consecutive steps that overflowed, oldest first; empty if the last step did not overflow.
    """

    def __init__(self, config: PrecisionConfig):
        self.scale = _float32(config.initial_scale)
        self.overflowed: list[float] = []
        self._interval, self._max_overflows = config.growth_interval, config.max_overflows
        self._good_steps = 0

    @property
    def exhausted(self) -> bool:
        """Whether the last `max_overflows` steps all overflowed, so that the scale cannot be the cause."""
        raise NotImplementedError("return whether the last `_max_overflows` steps or more all overflowed")

    def update(self, overflow: bool) -> None:
        """Adjust the scale after a step: multiply it by BACKOFF (0.5) on overflow, by GROWTH (2) after good steps.

        The scale grows after `growth_interval` consecutive successful steps; every change restarts the count. It stays
        a float32 number, has no lower limit, and is not doubled if the result would be infinite. overflow: whether a
        non-finite gradient on any rank caused a skip.
        """
        raise NotImplementedError("halve the scale after an overflow, double it after `_interval` successful steps")

    def state_dict(self) -> dict:
        """Return the scale and its counters for a checkpoint, as a JSON object."""
        return {"scale": self.scale, "good_steps": self._good_steps, "overflowed": list(self.overflowed)}

    def load_state_dict(self, state: dict) -> None:
        """Restore a state that `state_dict()` returned."""
        self.scale, self._good_steps = state["scale"], state["good_steps"]
        self.overflowed = list(state["overflowed"])

    @staticmethod
    def is_valid_state(state: Any) -> bool:
        """Whether an object read from JSON could have been returned by `state_dict()`."""
        if not isinstance(state, dict) or not isinstance(overflowed := state.get("overflowed"), list):
            return False
        numbers = [state.get("scale"), *overflowed]
        return type(state.get("good_steps")) is int and all(
            type(number) is float and math.isfinite(number) and number >= 0 for number in numbers
        )
