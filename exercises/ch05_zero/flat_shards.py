"""One flat parameter, cut into equal shards.

ZeRO gives each rank an equal shard of all parameters, wherever a parameter ends. Write the class that moves parameters
into one flat buffer, makes them views of it, and knows which of their elements are in this rank's shard.

parameters: {name: parameter of any shape}, of one dtype, in the order of the buffer. group: group.rank, group.size.
full: (size * n,), where n is the smallest number with room for all; the padding at the end is zero. shard: (n,).
Example: parameters a: (5,), b: (2, 2), c: () with the values 0 to 9, on 3 ranks.
    full     [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0] on each rank, 3 shards of n = 4; the last two are padding
    shard    rank 1: [4, 5, 6, 7], a view of full
    slices   rank 0: {"a": slice(0, 4)}, rank 1: {"a": slice(0, 1), "b": slice(1, 4)}
    specs    rank 1: "b" with the boxes of its elements 0 to 3: row 0, and the first element of row 1
    flatten({"c": tensor(7.)})   is [0, 0, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0], and the dictionary is empty afterwards

Checked: buffer, shard, slices and specs of some forty sets of parameters on 1 to 4 ranks, scalars and empty ones among
them; that parameters see what is written to the buffer; `flatten` with missing, transposed and other tensors; a
reduce-scatter and an all-gather of the result; and that nothing but the buffer stays in memory.

You may call:
    flat_boxes(shape, start, stop)   the boxes that cover elements start to stop of a tensor in memory order
    ParamSpec(name, shape, boxes, (group.ranks[group.rank],))   what this rank has of a parameter, as tuples
    torch.cat(tensors), tensor.new_zeros(number), tensor.chunk(number), tensor.flatten(), tensor.view(shape)
    parameter.data = tensor   gives a parameter other memory; tensor.detach(), dict.pop(name, default)

Check it with: python -m exercises check flat_shards

Stub 42bf6d97.
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
        raise NotImplementedError("lay the parameters out, and find what this rank's shard has of each")

    def flatten(self, tensors: dict[str, Tensor]) -> Tensor:
        """Pop the parameters' entries from `tensors` into a new flat buffer; missing ones and padding are zeros."""
        raise NotImplementedError("move the tensors into a new flat buffer")
