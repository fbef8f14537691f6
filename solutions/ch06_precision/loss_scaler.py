"""Dynamic loss scaling: the solution, as it stands in minidist.precision.scaler.

Backward is linear: the gradients of s times the loss are s times the gradients. So values below the smallest fp16
number, 6e-8, are moved up into fp16's range, and are divided by s in float32 afterwards. The best scale is the
largest one that does not overflow. It is unknown, and it changes during training, so the scaler searches for it: it
halves the scale at each overflow, and doubles it after two thousand good steps, at the price of one lost step if the
doubled scale was too large.

The count of good steps restarts after every change. Otherwise the scale would double right after it was halved, and
every second step would be lost. Halving has no lower limit, but doubling has an upper one: an infinite scale makes
all later gradients infinite.

Usual wrong answers:
* the scale is doubled one good step too late
* the package's own
* the scale is halved after every step
* an overflow halves the scale and leaves the count of good steps as it is
* overflows are counted from the start of the run, not as consecutive ones
* after the first `growth_interval` good steps the scale doubles in every one
* doubled in every growth_interval-th step of the run, whatever happened before
* the scale is never less than 1
* torch's GradScaler
* doubled without an end, the scale becomes infinite
* noted is the scale after the overflow, not the one that overflowed
* exhausted only when one step more than `max_overflows` overflowed
* overflow and no overflow are mixed up
* doubled as Python's float, which has room above the largest float32
* good steps are counted where no checkpoint has them
* nothing is done after a step
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
        return len(self.overflowed) >= self._most

    def update(self, overflow: bool) -> None:
        """Adjust the scale after a step. overflow: whether a non-finite gradient on any rank caused a skip."""
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
        """Return the state for a checkpoint, as a JSON object."""
        return {"scale": self.scale, "good_steps": self._good_steps, "overflowed": list(self.overflowed)}

    def load(self, state: dict) -> None:
        """Restore a state that `state()` returned."""
        self.scale, self._good_steps = state["scale"], state["good_steps"]
        self.overflowed = list(state["overflowed"])
