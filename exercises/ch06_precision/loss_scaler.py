"""Dynamic loss scaling.

The loss is multiplied by a scale before backward, and the gradients are divided by it afterwards. Write the class that
searches for the largest scale that does not overflow, and that continues the search after a restart.

LossScaler(config): config.initial_scale is a power of two; config.growth_interval and config.max_overflows are numbers
of steps. update(overflow) is called once per step, with a bool. scale is a float, at most 2**127, without a lower
limit; overflowed is a list of floats. state_dict() returns {"scale": float, "good_steps": int, "overflowed": list of
floats}, where good_steps is the number of good steps counted so far towards the next doubling. At 2**127 the count
restarts as well when the scale would double.
Example: with initial_scale=1024 and growth_interval=2, the scales after the steps good, good, overflow, good, good are
    1024, 2048, 1024, 1024, 2048
After the overflow, overflowed is [2048.0] until the next good step, and then []. With max_overflows=1
overflows_persist is True for just as long: it says whether the latest max_overflows steps all overflowed.

Checked: scale and good_steps of many sequences of steps against torch's own rule, up to 2**127, and down to 2**-180;
`overflowed` and `overflows_persist` with several limits; that a scaler that has loaded a state from JSON continues
exactly as the one that saved it; that scalers and states share no list; and a training loop on 1 and 2 ranks with
gradients of 2**-26 and 8.

You may call:
    len(list), min(a, b), float(number)   these suffice; the rest of Python is allowed

Check it with: python -m exercises check loss_scaler

Stub 56c31329.
"""

from minidist.config import PrecisionConfig


class LossScaler:
    """The loss scale: a power of two, as large as possible without overflow, so scaling is exact.

    scale: multiply the loss by it before backward, and divide the summed gradients by it. overflowed: the scales of the
    latest consecutive steps that overflowed, oldest first.
    """

    def __init__(self, config: PrecisionConfig):
        raise NotImplementedError("start with the initial scale, and no step")

    @property
    def overflows_persist(self) -> bool:
        """Whether so many consecutive steps overflowed that the scale cannot be the cause."""
        raise NotImplementedError("return whether `max_overflows` consecutive steps or more overflowed")

    def update(self, overflow: bool) -> None:
        """Halve the scale after an overflow; double it after `growth_interval` consecutive steps without one."""
        raise NotImplementedError("halve the scale after an overflow, double it after enough good steps")

    def state_dict(self) -> dict:
        """Return all that later steps depend on, as a JSON object."""
        raise NotImplementedError("return everything that later steps depend on")

    def load_state_dict(self, state: dict) -> None:
        """Restore what `state_dict` returned."""
        raise NotImplementedError("restore such a state")
