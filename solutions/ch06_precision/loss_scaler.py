"""Dynamic loss scaling: the solution, as it stands in minidist.precision.scaler.

Backward is linear: the gradients of s times the loss are s times the gradients. So values below the smallest fp16
number, 6e-8, are moved up into fp16's range, and are divided by s in float32 afterwards. The best scale is the
largest one that does not overflow. It is unknown, and it changes during training, so the scaler searches for it: it
halves the scale at each overflow, and doubles it after two thousand successful steps, at the price of one lost step
if the doubled scale was too large.

The count of successful steps restarts after every change. Otherwise the scale would double right after it was halved,
and every second step would be lost. Halving has no lower limit, but doubling has an upper one: an infinite scale
makes all later gradients infinite.

Usual wrong answers:
* doubles the scale one good step too late
* the package's own
* halves the scale after every step
* an overflow halves the scale but does not reset the count of good steps
* counts all overflows of the run, not consecutive ones
* after the first `growth_interval` good steps, every good step doubles the scale
* doubles the scale in every growth_interval-th step of the run, whatever happened before
* the scale never falls below 1
* torch's GradScaler
* the scale doubles without limit and becomes infinite
* records the scale after the overflow instead of the one that overflowed
* exhausted only when one step more than `max_overflows` overflowed
* swaps overflow and no overflow
* doubles a Python float, which exceeds the largest float32
* stores the count of good steps where checkpoints do not include it
* does nothing after a step
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
        return len(self.overflowed) >= self._max_overflows

    def update(self, overflow: bool) -> None:
        """Adjust the scale after a step: multiply it by BACKOFF (0.5) on overflow, by GROWTH (2) after good steps.

        The scale grows after `growth_interval` consecutive successful steps; every change restarts the count. It stays
        a float32 number, has no lower limit, and is not doubled if the result would be infinite. overflow: whether a
        non-finite gradient on any rank caused a skip.
        """
        if overflow:
            self.overflowed.append(self.scale)
            self.scale, self._good_steps = _float32(self.scale * BACKOFF), 0
            return
        self.overflowed.clear()
        self._good_steps += 1
        if self._good_steps == self._interval:
            grown = _float32(self.scale * GROWTH)
            # An infinite scale would make every later gradient overflow.
            self.scale, self._good_steps = grown if grown < float("inf") else self.scale, 0

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
