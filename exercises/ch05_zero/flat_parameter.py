"""One flat parameter, cut into equal shards.

ZeRO gives each rank an equal shard of all parameters, wherever a parameter ends. Write the class that moves parameters
into one flat buffer of which they become views, and that can free this buffer and gather it again from all shards.

parameters: {name: parameter of any shape}, of one dtype, in the order of the buffer. masters: {name: tensor}, the
values; it may have other names, too. If the masters have another dtype, the buffer has their values rounded, and
`master` is a copy of this rank's shard of them; else `master` is the shard itself. group: group.rank, group.size. full:
(n * size,) on n ranks, with the smallest size; the padding at the end is zero. shard: (size,), a view of full, or a
copy if own_shard; full keeps its memory until `free` is called. grad: (size,), zeros, in the masters' dtype. places:
{name: (slice of the shard, offset of its first element in the flattened parameter)}; a parameter without elements in
the shard is left out. Further attributes: `size`, `group`, and `parameters`, a new dictionary of those given.
Example: parameters a: (5,), b: (2, 2), c: () with the values 0 to 9, on 3 ranks.
    full     [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0] on each rank, size 4; the last two elements are padding
    places   rank 0: {"a": (slice(0, 4), 0)}   rank 1: {"a": (slice(0, 1), 4), "b": (slice(1, 4), 0)}
    flatten({"c": tensor(7.)}, like=full)   [0, 0, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0]
start_gather returns at once, while the shards are in flight; it launches nothing if the buffer has its memory, or has
no elements. `wait` waits for the gather in flight; if there is none, as in a second call, it does nothing. `free` frees
the buffer's memory; if a gather is in flight, it waits for it first.

Checked: size, buffer, shard, master, grad and places of some forty sets of parameters on 1 to 4 ranks, scalars and
empty ones among them, in four dtypes and with wider masters; that parameters see what is written to the buffer;
`flatten` with missing and transposed tensors, which stay unchanged, into a new buffer; the bytes of the buffer after
start_gather and free, what is launched and waited for, in repeated calls; that nothing else stays in memory.

You may call:
    all_gather(output, input, group, async_op=True)   concatenates the (size,) of all ranks in (n * size,); a Handle
    handle.wait()   waits until the all-gather has ended
    tensor.untyped_storage().resize_(nbytes)   frees memory (0) or allocates it anew; views of the tensor stay views
    tensor.untyped_storage().size()   its bytes now; tensor.nbytes   the bytes of its elements
    parameter.data = tensor   gives a parameter other memory; tensor.detach(), tensor.clone(), tensor.to(dtype)
    torch.zeros(number, dtype=..., device=...), tensor.chunk(number), tensor.flatten(), tensor.view(shape)

Check it with: python -m exercises check flat_parameter

Stub ff253164.
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
        raise NotImplementedError("lay out the buffer, the shard and the master, and find the place of each parameter")

    def flatten(self, tensors: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Concatenate one tensor per parameter, zeros for those that are missing, and the padding: (n * size,).

        like: any tensor of the dtype and device of the result.
        """
        raise NotImplementedError("copy the tensors to their offsets in a new buffer")

    def start_gather(self) -> None:
        """Collective if the buffer is freed: allocate it, and start the all-gather of its shards; `wait` before use."""
        raise NotImplementedError("allocate the buffer and launch its all-gather")

    def wait(self) -> None:
        """Wait for the all-gather in flight, if any."""
        raise NotImplementedError("wait for the gather in flight")

    def free(self) -> None:
        """Free the buffer's memory. The parameters stay views of it, without values until the next all-gather."""
        raise NotImplementedError("free the memory of the buffer")
