"""The scale of the loss: the solution, as it stands in minidist.precision.scaler.

Backward is linear: a loss times s gives gradients times s, so what would be below the smallest fp16 number, 6e-8, is
moved up to where fp16 has numbers, and is divided by s again in float32. The best scale is the largest that does not
overflow. Nobody knows it, and it changes as training goes on, so it is looked for from above: halve at the first
overflow, and try twice as much after two thousand good steps, at the price of one lost step when that was too much.

The count of good steps begins anew after every change. Otherwise the scale would double right after it was halved,
and every second step be lost. Halving has no floor and doubling has one ceiling: an infinite scale makes every later
gradient infinite.

Usual wrong answers:
* the scale is doubled one good step too late
* the package's own
* the scale is halved after every step
* an overflow halves the scale and leaves the count of good steps as it is
* overflows are counted from the start of the run, not in a row
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
