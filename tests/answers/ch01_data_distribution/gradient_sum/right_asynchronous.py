"""Starts all operations before it waits for the first."""

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
        started = []
        for name, parameter in self._parameters.items():
            total = self._sums.get(name, torch.zeros_like(parameter))
            used = torch.tensor(int(name in self._sums))
            handles = [all_reduce(each, self._groups[name], async_op=True) for each in (total, used)]
            started.append((parameter, total, used, handles))
        for parameter, total, used, handles in started:
            for handle in handles:
                handle.wait()
            parameter.grad = total if used.item() else None
        self._sums = {}
