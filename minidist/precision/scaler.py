"""Dynamic loss scaling: multiply the loss, so that fp16 gradients do not underflow (below 6e-8), and unscale them.

Micikevicius et al. 2018 (arXiv 1710.03740, section 3.2), with the rules of torch.amp.GradScaler. The caller reports
overflow after a reduction over all ranks (`train.step_result`), so all ranks keep the same scale.
"""

import math
import struct
from typing import Any

from minidist.config import PrecisionConfig

GROWTH = 2.0
BACKOFF = 0.5


class LossScaler:
    """The dynamic loss scale, for gradients that would underflow in fp16.

    scale: the factor of this step's loss; a float32 number, as in torch. overflowed: the loss scales of the latest
    consecutive steps that overflowed, oldest first; empty if the last step did not overflow.
    """

    def __init__(self, config: PrecisionConfig):
        self.scale = _float32(config.initial_scale)
        self.overflowed: list[float] = []
        self._interval = config.growth_interval
        self._max_overflows = config.max_overflows
        self._good_steps = 0

    @property
    def overflows_persist(self) -> bool:
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
            self.scale = _float32(self.scale * BACKOFF)
            self._good_steps = 0
            return
        self.overflowed.clear()
        self._good_steps += 1
        if self._good_steps == self._interval:
            grown = _float32(self.scale * GROWTH)
            # An infinite scale would make every later gradient overflow.
            self.scale = grown if grown < float("inf") else self.scale
            self._good_steps = 0

    def state_dict(self) -> dict:
        """Return the scale and its counters for a checkpoint, as a JSON object."""
        return {"scale": self.scale, "good_steps": self._good_steps, "overflowed": list(self.overflowed)}

    def load_state_dict(self, state: dict) -> None:
        """Restore a state that `state_dict()` returned."""
        self.scale = state["scale"]
        self._good_steps = state["good_steps"]
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


def _float32(number: float) -> float:
    """Return the nearest float32, infinity on overflow."""
    try:
        return struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        return float("inf")
