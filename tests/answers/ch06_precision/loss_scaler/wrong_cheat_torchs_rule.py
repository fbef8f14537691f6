"""halved_after_an_overflow (forbidden): torch's own rule"""

import torch

from minidist.config import PrecisionConfig


class LossScaler:
    """The scale of the loss, from step to step."""

    def __init__(self, config: PrecisionConfig):
        self.config, self.tensor, self.count = config, torch.tensor([config.initial_scale]), torch.zeros(1).int()
        self.overflowed = []

    @property
    def scale(self):
        return self.tensor.item()

    @property
    def exhausted(self):
        return len(self.overflowed) >= self.config.max_overflows

    def update(self, overflow):
        self.overflowed = [*self.overflowed, self.scale] if overflow else []
        found = torch.tensor(float(overflow))
        torch._amp_update_scale_(self.tensor, self.count, found, 2.0, 0.5, self.config.growth_interval)

    def state(self):
        return {"scale": self.scale, "count": self.count.item(), "overflowed": self.overflowed}

    def load(self, state):
        self.tensor.fill_(state["scale"])
        self.count.fill_(state["count"])
        self.overflowed = state["overflowed"]
