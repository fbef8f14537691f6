"""One flat parameter, cut into equal shards: the solution, as it stands in minidist.zero.simple.

Assigning whole parameters to ranks gives unequal loads: an embedding may be larger than all other parameters
together. One flat parameter that is cut into equal shards gives every rank the same number of elements, and needs one
message for all of them. The boundaries of shards are independent of the boundaries of parameters, so one parameter
may be spread over several ranks, and a shard may contain parts of many parameters.

Reduce-scatter and all-gather need shards of equal length, so the buffer ends in padding. The padding is sent and
stored like the rest but belongs to no parameter: code that treats it as one computes a wrong norm. It must be zero,
because uninitialized memory may contain NaN, and a sum over the ranks would keep it. Parameters are views of the
buffer: one all-gather updates all of them, without further copies.

Usual wrong answers:
* adds padding although the length is divisible
* the boxes of the first elements of the parameter, whichever the shard has
* returns the same buffer from every call of flatten
* lays parameters out in the order of their names
* the package's own
* empties the dictionary, with the tensors of other flat parameters
* the buffer is full of ones
* gives each parameter a copy of its range instead of a view
* keeps the parameters' values beside the buffer
* counts slices from the start of the buffer
* counts slices from the start of the parameter
* includes parameters of which the shard has no element
* pads every parameter separately, so the buffer is longer than necessary
* names the rank within the group in the spec, not the global rank
* a missing tensor counts with the values of the parameter
* leaves out missing tensors, so that later ones move to the front
* leaves the tensors in the dictionary, which keeps their memory
* does not pad: right only when the sizes divide, otherwise the last shard is shorter
* the buffer holds copies; the parameters do not see gathered values
* rounds the shard length down, so the last parameter does not fit
* the shard has memory of its own, which the parameters do not see
* every rank has the first shard: right on one rank only
* every rank's shard is the whole buffer
* leaves out a parameter of which only a part is in the shard
* the buffer is empty: parameters lose their values
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from minidist.comm import Group
from minidist.parameters import ParamSpec, flat_boxes


class FlatParameter:
    """Parameters concatenated in one flat buffer, which ends in padding and is cut into one shard per rank.

    parameters: by name; each becomes a view of the buffer. group: rank r has shard r. full: (size * n,), the buffer,
    with the smallest n. shard: (n,), this rank's, a view of it. slices, specs: where in the shard a parameter's
    elements are, and their `ParamSpec`, by name. grad: (n,), this rank's shard of the summed gradient; None at first.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: Group):
        self.parameters, self.group, self.slices, self.specs, self.grad = dict(parameters), group, {}, {}, None
        self.full = self.flatten(dict(parameters))
        self.shard = self.full.chunk(group.size)[group.rank]
        begin, end, offset = group.rank * len(self.shard), (group.rank + 1) * len(self.shard), 0
        for name, parameter in parameters.items():
            first, offset = offset, offset + parameter.numel()
            parameter.data = self.full[first:offset].view(parameter.shape)
            start, stop = max(first, begin), min(offset, end)
            if start < stop:
                self.slices[name] = slice(start - begin, stop - begin)
                boxes = flat_boxes(parameter.shape, start - first, stop - first)
                self.specs[name] = ParamSpec(name, tuple(parameter.shape), tuple(boxes), (group.ranks[group.rank],))

    def flatten(self, tensors: dict[str, Tensor]) -> Tensor:
        """Pop the parameters' entries from `tensors` into a new flat buffer; missing ones and padding are zeros."""
        parts = [tensors.pop(name, torch.zeros_like(p)).detach().flatten() for name, p in self.parameters.items()]
        return torch.cat([*parts, parts[0].new_zeros(-sum(map(len, parts)) % self.group.size)])
