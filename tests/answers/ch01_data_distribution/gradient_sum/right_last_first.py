"""Goes through the parameters from the last to the first."""

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
        for name, parameter in reversed(self._parameters.items()):
            pair = [self._sums.get(name, torch.zeros_like(parameter)), torch.tensor([float(name in self._sums)])]
            for tensor in reversed(pair):
                all_reduce(tensor, self._groups[name])
            parameter.grad = pair[0].view_as(parameter) if pair[1].item() else None
        self._sums = {}
