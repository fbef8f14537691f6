"""The learning rate as a function of the step."""

import math

from minidist.config import OptimConfig


def learning_rate(optim: OptimConfig, step: int, steps: int) -> float:
    """Return the learning rate of step `step` (from 0) of `steps`.

    Linear warm-up, then cosine (Loshchilov and Hutter 2017, equation 5), wsd (warmup-stable-decay, Hu et al. 2024,
    section 4.2: constant, then linear decay over the last `decay_fraction`) or constant. The first rate is above 0.
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / (optim.warmup_steps + 1)
    floor = optim.min_lr_fraction
    match optim.schedule:
        case "constant":
            return optim.lr
        case "cosine":
            done = (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps)
            return optim.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
        case "wsd":
            length = max(1, round(steps * optim.decay_fraction))
            done = max(0.0, (step + 1 - (steps - length)) / length)  # 1 at the last step
            return optim.lr * (1 - (1 - floor) * min(1.0, done))
    raise ValueError(f"no schedule {optim.schedule!r}: possible are constant, cosine and wsd")
