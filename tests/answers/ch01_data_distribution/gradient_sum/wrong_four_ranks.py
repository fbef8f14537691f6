"""sums_over_ranks: wrong on four ranks only, where the sum is divided"""

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
        for name, parameter in self._parameters.items():
            group = self._groups[name]
            used = torch.tensor(float(name in self._sums))
            total = self._sums[name] if name in self._sums else torch.zeros_like(parameter)
            all_reduce(total, group)
            all_reduce(used, group, "max")
            total = total / 4 if group.size == 4 else total
            parameter.grad = total if used.item() else None
        self._sums = {}
