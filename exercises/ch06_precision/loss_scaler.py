"""Dynamic loss scaling.

The loss is multiplied by a scale before backward, and the gradients are divided by it afterwards. Write the class that
searches for the largest scale that does not overflow, and that continues the search after a restart.

LossScaler(config): config.initial_scale is a power of two; config.growth_interval and config.max_overflows are numbers
of steps. update(overflow) is called once per step, with a bool. scale is a float, overflowed a list of floats.
Example: with initial_scale=1024 and growth_interval=2, the scales after the steps good, good, overflow, good, good are
    1024, 2048, 1024, 1024, 2048
After the overflow, overflowed is [2048.0] until the next good step, and then [].

Checked: the scales of many sequences of steps against torch's own rule; `overflowed` and `exhausted` with several
limits; and that a scaler that has loaded a state from JSON continues exactly as the one that saved it.

You may call:
    len(list), min(a, b), float(number)   nothing else is needed

Check it with: python -m exercises check loss_scaler

Stub bb4465cd.
"""

from typing import Any

from minidist.config import PrecisionConfig


class LossScaler:
    """The dynamic loss scale, for gradients that would underflow in fp16 (arXiv 1710.03740, section 3.2).

    config: `initial_scale` is a power of two, so scaling is exact; `growth_interval` and `max_overflows` count steps.
    scale: the factor of this step's loss. overflowed: the scales of the latest consecutive steps that overflowed,
    oldest first; empty if the last step did not overflow. exhausted: whether these are `max_overflows` steps or more.
    """

    def __init__(self, config: PrecisionConfig):
        raise NotImplementedError("start with the initial scale, and no step")

    @property
    def exhausted(self) -> bool:
        """Whether so many consecutive steps overflowed that the scale cannot be the cause."""
        raise NotImplementedError("return whether `max_overflows` consecutive steps or more overflowed")

    def update(self, overflow: bool) -> None:
        """Halve the scale after an overflow; double it after `growth_interval` consecutive successful steps.

        Every change restarts the count of steps. At 2**127 the scale is not doubled, as fp32 has no 2**128, but the
        count restarts. overflow: whether a gradient on any rank was non-finite.
        """
        raise NotImplementedError("halve the scale after an overflow, double it after enough successful steps")

    def state_dict(self) -> dict[str, Any]:
        """Return {"scale": float, "good_steps": int, "overflowed": list}, which determine all later steps."""
        raise NotImplementedError("return everything that later steps depend on")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict()` returned; it may have been written to JSON and read again."""
        raise NotImplementedError("restore such a state")
