"""A class of its own: no count, but the steps since the last change."""

import torch


def rounded(number):
    """To the nearest float32."""
    return torch.tensor(number, dtype=torch.float64).float().item()


class LossScaler:
    """The scale of the loss, from step to step."""

    def __init__(self, config):
        self.scale, self.overflowed, self.good = rounded(config.initial_scale), [], []
        self.interval, self.most = config.growth_interval, config.max_overflows

    @property
    def exhausted(self):
        return len(self.overflowed[: self.most]) == self.most

    def update(self, overflow):
        if overflow:
            self.overflowed, self.good = [*self.overflowed, self.scale], []
            self.scale = rounded(self.scale * 0.5)
        else:
            self.overflowed, self.good = [], [*self.good, True]
        if len(self.good) == self.interval:
            self.good, twice = [], rounded(self.scale * 2.0)
            self.scale = self.scale if twice == float("inf") else twice

    def state(self):
        return {"scale": self.scale, "good": self.good, "overflowed": self.overflowed}

    def load(self, state):
        self.scale, self.good, self.overflowed = state["scale"], state["good"], state["overflowed"]
