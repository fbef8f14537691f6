"""Sends everything in one tensor, the flags at its end."""

import torch

from minidist.comm import all_reduce
from minidist.parallel.data.reducer import group_of, trainable


class NaiveSink:
    def __init__(self, parameters, specs, groups):
        self._parameters = trainable(parameters)
        self._groups = {name: group_of(specs[name], list(groups)) for name in self._parameters}
        self._sums = {}

    def add(self, name, grad):
        self._sums[name] = self._sums[name] + grad if name in self._sums else grad.clone()

    def ready(self, name):
        pass

    def clear(self):
        self._sums = {}

    def finish(self):
        names = list(self._parameters)
        parts = [self._sums.get(name, torch.zeros_like(self._parameters[name])).flatten() for name in names]
        flags = torch.tensor([float(name in self._sums) for name in names])
        buffer = torch.cat([*parts, flags])
        all_reduce(buffer, self._groups[names[0]])
        sizes = [part.numel() for part in parts]
        for name, total, used in zip(names, buffer.split([*sizes, len(names)]), buffer[-len(names) :], strict=False):
            parameter = self._parameters[name]
            parameter.grad = total.view_as(parameter).clone() if used.item() else None
        self._sums = {}
