"""sums_over_ranks: ones, whatever was added"""

import torch

from minidist.comm import all_reduce
from minidist.parallel.data.buckets import FIRST_BYTES, assign
from minidist.parallel.data.reducer import group_of, trainable


class Bucket:
    def __init__(self, parameters, group, reports=()):
        first = next(iter(parameters.values()))
        numel = sum(parameter.numel() for parameter in parameters.values())
        self.group, self.reports, self.handle, self.views, offset = group, reports, None, {}, 0
        self.buffer = torch.zeros(numel + len(reports), dtype=first.dtype)
        self.uses = self.buffer[numel:]
        for name, parameter in parameters.items():
            self.views[name] = self.buffer[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    def launch(self, filled):
        for name in self.views:
            if name not in filled:
                self.views[name].zero_()
        for i, name in enumerate(self.reports):
            self.uses[i] = float(name in filled)
        self.handle = all_reduce(self.buffer, self.group, async_op=True)


class BucketedSink:
    def __init__(self, parameters, specs, groups, bucket_bytes):
        self._parameters = trainable(parameters)
        names = list(reversed(self._parameters))
        group = group_of(specs[names[0]], list(groups))
        sizes = {name: self._parameters[name].numel() * self._parameters[name].element_size() for name in names}
        cuts = assign(sizes, bucket_bytes, FIRST_BYTES)
        self._buckets = []
        for cut in cuts:
            reports = names if cut is cuts[-1] else []
            self._buckets.append(Bucket({name: self._parameters[name] for name in cut}, group, reports))
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.views}
        self._start_step()

    def _start_step(self):
        self._filled, self._awaited, self._next = set(), set(self._parameters), 0

    def add(self, name, grad):
        view = self._bucket_of[name].views[name]
        view.copy_(view + grad if name in self._filled else grad)
        self._filled.add(name)

    def ready(self, name):
        self._awaited.discard(name)
        while self._next < len(self._buckets) and not self._awaited & self._buckets[self._next].views.keys():
            self._launch_next()

    def _launch_next(self):
        self._buckets[self._next].launch(self._filled)
        self._next += 1

    def finish(self):
        while self._next < len(self._buckets):
            self._launch_next()
        for bucket in self._buckets:
            bucket.handle.wait()
        for bucket in self._buckets:
            bucket.buffer.fill_(1)
        for name, uses in zip(self._buckets[-1].reports, self._buckets[-1].uses.tolist(), strict=True):
            self._parameters[name].grad = self._bucket_of[name].views[name] if uses else None
        self._start_step()

    def clear(self):
        self._start_step()
        for parameter in self._parameters.values():
            parameter.grad = None
