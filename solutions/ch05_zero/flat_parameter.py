"""One flat parameter, cut into equal shards: the solution, as it stands in minidist.simple.zero.

Assigning whole parameters to ranks gives unequal loads: an embedding may be larger than all other parameters
together. One flat parameter that is cut into equal shards gives every rank the same number of elements, and needs one
collective for all of them. The boundaries of shards are independent of the boundaries of parameters, so one parameter
may be spread over several ranks, and a shard may contain parts of many parameters.

Reduce-scatter and all-gather need shards of equal length, so the buffer ends in padding. The padding is sent and
stored like the rest but belongs to no parameter: code that treats it as one computes a wrong norm. It must be zero,
because uninitialized memory may contain NaN, and a sum over the ranks would keep it.

Parameters are views of the buffer: one all-gather updates all of them, without copies. Freeing empties the storage
and keeps the tensor objects, so the views, also those that autograd has saved, see the values of the next all-gather.
What is freed must not be the only copy of the shard: stage 3 gives the shard memory of its own.

Usual wrong answers:
* adds padding although the length is divisible
* returns the same buffer from every call of flatten
* the package's own
* the buffer is full of ones
* flattens to the dtype of the parameters, whatever `like` is
* lists parameters that only touch the shard, with empty slices
* start_gather returns when the gather has ended
* gathers a buffer that has its values
* launches an all-gather even for a buffer without elements
* the summed gradient has the dtype of the parameters
* a second `wait`, with no gather in flight, waits once more for the old one
* makes the masters from the rounded buffer
* the master is a view of all masters, which stay in memory
* free keeps the memory
* gives the first element's position in the buffer, not in the parameter
* concatenates the given tensors in their own order, without zeros for missing ones
* the parameters keep their own memory
* counts the slice from the start of the buffer, not of the shard: right on rank 0 only
* rounds the shard length down, so the last parameter does not fit
* the shard stays a view of the buffer: whoever frees the buffer frees the shard
* every rank has the first shard: right on one rank only
* does not end a slice at the end of the shard, if the parameter goes on in the next one; indexing hides that
* if the dtypes are equal, takes the values of the parameters instead of those of the masters
* the buffer is zero: parameters lose their values
"""

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

from minidist.comm import Group, Handle, all_gather
from minidist.simple.data_parallel import Tensors


class FlatParameter:
    """Parameters concatenated in one flat buffer, which ends in padding and is cut into one shard per rank.

    parameters: by name; each becomes a view of the buffer. masters: their values in the dtype in which the optimizer
    updates them, by name. group: rank r has shard r. own_shard: give the shard memory of its own, so that `free` can
    free the buffer's.

    full: (n * size,), the buffer. shard: (size,), this rank's shard of it. master: (size,), the shard in the masters'
    dtype; the shard itself if the dtypes are equal. grad: (size,), this rank's shard of the summed gradient. places:
    for each parameter that overlaps this shard, the slice of the shard that its elements fill, and the index of the
    first of these elements in the flattened parameter.
    """

    def __init__(self, parameters: Tensors, masters: Tensors, group: Group, own_shard: bool):
        self.parameters, self.group = dict(parameters), group
        *offsets, numel = accumulate((parameter.numel() for parameter in parameters.values()), initial=0)
        self.offsets = dict(zip(parameters, offsets, strict=True))
        self.size = -(-numel // group.size)
        values = self.flatten({name: masters[name] for name in parameters}, like=masters[next(iter(parameters))])
        self.full = values.to(next(iter(parameters.values())).dtype)
        self.shard = self.full.chunk(group.size)[group.rank]
        if own_shard:
            self.shard = self.shard.clone()
        self.master = self.shard
        if values.dtype != self.full.dtype:
            self.master = values.chunk(group.size)[group.rank].clone()
        self.grad = torch.zeros_like(self.master)
        self.gathering: Handle | None = None
        self.places: dict[str, tuple[slice, int]] = {}
        first = group.rank * self.size
        for name, parameter in parameters.items():
            offset, end = self.offsets[name], self.offsets[name] + parameter.numel()
            parameter.data = self.full[offset:end].view(parameter.shape)
            start, stop = max(offset, first), min(end, first + self.size)
            if start < stop:
                self.places[name] = slice(start - first, stop - first), start - offset

    def flatten(self, tensors: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Concatenate one tensor per parameter, zeros for those that are missing, and the padding: (n * size,).

        like: any tensor of the dtype and device of the result.
        """
        flat = torch.zeros(self.group.size * self.size, dtype=like.dtype, device=like.device)
        for name, tensor in tensors.items():
            flat[self.offsets[name] : self.offsets[name] + tensor.numel()] = tensor.detach().flatten()
        return flat

    def start_gather(self) -> None:
        """Collective if the buffer is freed: allocate it, and start the all-gather of its shards; `wait` before use."""
        if self.full.untyped_storage().size() < self.full.nbytes:
            self.full.untyped_storage().resize_(self.full.nbytes)
            self.gathering = all_gather(self.full, self.shard, self.group, async_op=True)

    def wait(self) -> None:
        """Wait for the all-gather in flight, if any."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def free(self) -> None:
        """Free the buffer's memory. The parameters stay views of it, without values until the next all-gather."""
        self.wait()
        self.full.untyped_storage().resize_(0)
