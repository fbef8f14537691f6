"""halved_after_an_overflow (forbidden): torch's GradScaler"""

import torch

from minidist.config import PrecisionConfig


class LossScaler:
    """The scale of the loss, from step to step."""

    def __init__(self, config: PrecisionConfig):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=config.initial_scale)
        self.overflowed, self.exhausted = [], False

    @property
    def scale(self):
        return self.scaler.get_scale()

    def update(self, overflow):
        self.scaler.update(self.scale / 2 if overflow else self.scale)

    def state(self):
        return self.scaler.state_dict()

    def load(self, state):
        self.scaler.load_state_dict(state)
