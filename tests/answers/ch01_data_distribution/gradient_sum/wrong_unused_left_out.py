"""unused_is_agreed: a rank that did not use a parameter does not take part, and the others wait for ever"""

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
            if name not in self._sums:
                parameter.grad = None
                continue
            all_reduce(self._sums[name], group)
            parameter.grad = self._sums[name]
        self._sums = {}
