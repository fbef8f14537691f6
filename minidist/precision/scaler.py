"""Dynamic loss scaling: gradients in fp16 below 6e-8 would be 0, so the loss is multiplied and gradients divided again.

Micikevicius et al. 2018 (arXiv 1710.03740, section 3.2); the rules are those of torch.amp.GradScaler. Whether a
gradient overflowed is not asked here: all ranks learn it together, from the control vector, and so agree on the scale.
"""

import struct

from minidist.config import PrecisionConfig

GROWTH = 2.0
BACKOFF = 0.5


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
        return len(self.overflowed) >= self._most

    def update(self, overflow: bool) -> None:
        """Learn how a step went. overflow: whether a gradient of any rank was not finite, and the step was skipped."""
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

    def state(self) -> dict:
        """What a checkpoint keeps, as JSON has it."""
        return {"scale": self.scale, "good_steps": self._good_steps, "overflowed": list(self.overflowed)}

    def load(self, state: dict) -> None:
        """Go on from what `state` gave."""
        self.scale, self._good_steps = state["scale"], state["good_steps"]
        self.overflowed = list(state["overflowed"])


def _float32(number: float) -> float:
    """The nearest float32; too large a number is infinite."""
    try:
        return struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        return float("inf")
