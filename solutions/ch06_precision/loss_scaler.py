"""Dynamic loss scaling: the solution, as it stands in minidist.simple.mixed_precision.

Backward is linear: the gradients of s times the loss are s times the gradients. So values below the smallest fp16
number, 6e-8, are moved up into fp16's range, and are divided by s in float32 afterwards. The best scale is the
largest one that does not overflow. It is unknown, and it changes during training, so the scaler searches for it: it
halves the scale at each overflow, and doubles it after two thousand successful steps, at the price of one lost step
if the doubled scale was too large.

The count of successful steps restarts after every change. Otherwise the scale would double right after it was halved,
and every second step would be lost. Halving has no lower limit, but doubling has an upper one: an infinite scale
makes all later gradients infinite. A checkpoint includes the list of overflowed scales: without it a run that
overflows in every step, and is restarted often enough, never notices that the scale is not the cause.

Usual wrong answers:
* doubles the scale one good step too late
* the package's own
* halves the scale after every step
* an overflow halves the scale but does not reset the count of good steps
* doubles at every multiple of growth_interval, without a reset of the count: the scales are right, good_steps is not
* begins to count good steps anew after a restart
* counts all overflows of the run, not consecutive ones
* after the first `growth_interval` good steps, every good step doubles the scale
* doubles the scale in every growth_interval-th step of the run, whatever happened before
* exhausted after exactly `max_overflows` overflows, and no longer after one more
* overflows_persist is set by the steps only, and False right after a state was loaded
* the scale never falls below the smallest normal float32
* the scale never falls below 1
* torch's GradScaler
* doubles a Python number without limit, past the largest float32
* halves with an integer division, which ends at 0
* doubles after 2,000 good steps, whatever the configuration
* makes a new list at each overflow, but empties it in place, and with it the list of a state that was saved
* the state holds the scaler's own list, which later steps change
* records the scale after the overflow instead of the one that overflowed
* exhausted only when one step more than `max_overflows` overflowed
* swaps overflow and no overflow
* saves the overflows, but does not load them
* loses the overflows at a restart
* begins with the initial scale again after a restart
* the scale is an int as long as config.initial_scale is one and no step overflows
* its state changes when the scaler goes on
* does nothing after a step
"""

from minidist.config import PrecisionConfig


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
