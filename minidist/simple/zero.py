"""ZeRO: data parallelism that shards optimizer states, gradients and parameters instead of replicating them.

Rajbhandari et al. 2020, arXiv 1910.02054, section 5. The parameters of each block are concatenated in one flat
parameter, of which every one of n ranks has a shard:

    stage 1   the optimizer states (and masters) of the shard only; gradients are reduce-scattered after backward
    stage 2   and gradients: each block's flat gradient is reduce-scattered, and freed, when its backward is over
    stage 3   and parameters: each block's flat parameter is all-gathered when it is needed, and freed afterwards

Each stage is a gradient reducer, with the interface that `data_parallel` describes.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from minidist.comm import Group, Handle, all_gather, reduce_scatter
from minidist.simple.data_parallel import NaiveReducer, Tensors

Blocks = Mapping[nn.Module, Sequence[str]]  # layers, in the order of forward, each with the names of its parameters


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


class ZeroStage1(NaiveReducer):
    """Each rank updates its shard of every flat parameter, and so has optimizer states of this shard only.

    parameters, masters, group: as in `data_parallel.NaiveReducer`. blocks: the layers of the model; all other
    parameters, of the embedding, the final norm and the head, are in the root.

    root: the flat parameter of the root, None on a pipeline stage without one. blocks: those of the blocks. masters:
    this rank's elements of each parameter, flat, which the optimizer updates. local: the gradients that are not yet
    reduced, by name.
    """

    shards_parameters = False

    def __init__(self, parameters: Tensors, masters: Tensors, blocks: Blocks, group: Group):
        def make_flat(names: Sequence[str]) -> FlatParameter:
            return FlatParameter({name: parameters[name] for name in names}, masters, group, self.shards_parameters)

        in_blocks = {name for names in blocks.values() for name in names}
        outside = [name for name in parameters if name not in in_blocks]
        self.root = make_flat(outside) if outside else None
        self.blocks = [make_flat(names) for names in blocks.values()]
        self.flat_params = [*self.blocks, self.root] if outside else self.blocks
        shards = {name: flat.master[place] for flat in self.flat_params for name, (place, _) in flat.places.items()}
        super().__init__(parameters, shards, group)

    def allocate_sums(self) -> dict[str, Tensor]:
        """Return each master's slice of the gradient of its flat parameter, by name."""
        return {name: flat.grad[place] for flat in self.flat_params for name, (place, _) in flat.places.items()}

    def clear(self) -> None:
        """Forget all gradients; call it before every step."""
        super().clear()
        self.local: dict[str, Tensor] = {}

    def add(self, name: str, gradient: Tensor) -> None:
        """Add the local gradient of one micro-batch to the sum of parameter `name`."""
        self.num_added[name] += 1
        if name in self.local:
            self.local[name] += gradient
        else:
            self.local[name] = gradient.to(self.flat_params[0].grad.dtype, copy=True)

    def reduce(self, flat: FlatParameter) -> None:
        """Collective: reduce-scatter the local gradients of a flat parameter, and add the result to its `grad`."""
        gradients = {name: self.local.pop(name) for name in flat.parameters if name in self.local}
        summed = torch.empty_like(flat.grad)
        reduce_scatter(summed, flat.flatten(gradients, like=summed), self.group)
        flat.grad += summed

    def reduce_sums(self) -> None:
        """Collective: reduce all flat parameters, in the same order on all ranks."""
        for flat_param in self.flat_params:
            self.reduce(flat_param)

    @torch.no_grad()
    def update_parameters(self) -> None:
        """Collective: round the masters to the shards, and all-gather these; stage 3 gathers them when needed."""
        for flat in self.flat_params:
            if flat.master is not flat.shard:
                flat.shard.copy_(flat.master)
            if self.shards_parameters:
                flat.free()  # what it holds is old
            else:
                all_gather(flat.full, flat.shard, self.group)


class ZeroStage2(ZeroStage1):
    """Stage 1 that reduces the gradients of each block as soon as its backward is over, and then frees them.

    A rank has the unreduced gradients of at most one block at a time, at the price of one reduce-scatter per block and
    micro-batch. The root's are reduced at the end of the step: the gradient of an embedding that another pipeline stage
    shares is complete then.

    pending: the blocks that are not yet reduced in this micro-batch. Every rank reduces them from the last one on,
    which is the order of backward.
    """

    def clear(self) -> None:
        """Forget all gradients; call it before every step."""
        super().clear()
        self.pending = list(self.blocks)

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a local gradient; reduce pending blocks, from the last one on, while their gradients are complete."""
        super().add(name, gradient)
        while self.pending and self.local.keys() >= self.pending[-1].parameters.keys():
            self.reduce(self.pending.pop())

    def end_micro_batch(self) -> None:
        """Collective: reduce the blocks that have not received all their gradients in this micro-batch."""
        for flat in reversed(self.pending):
            self.reduce(flat)
        self.pending[:] = self.blocks

    def reduce_sums(self) -> None:
        """Collective: reduce the root's gradients."""
        if self.root is not None:
            self.reduce(self.root)


class ZeroStage3(ZeroStage2):
    """Stage 2 that also gathers each block's parameters before its forward and its backward, and frees them after.

    prefetch: start the all-gather of the next block while this one computes.
    """

    shards_parameters = True

    def __init__(self, parameters: Tensors, masters: Tensors, blocks: Blocks, group: Group, prefetch: bool = True):
        super().__init__(parameters, masters, blocks, group)
        self.prefetch = prefetch
        self.free_root()
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda *_, index=index: self.gather_block(index, index + 1))
            block.register_forward_hook(lambda *_, index=index: self.blocks[index].free())
            block.register_full_backward_pre_hook(lambda *_, index=index: self.gather_block(index, index - 1))

    def gather_block(self, index: int, following: int) -> None:
        """Collective: gather a block that is about to compute. following: the one after it, whose gather may start."""
        self.blocks[index].start_gather()
        self.blocks[index].wait()
        if self.prefetch and 0 <= following < len(self.blocks):
            self.blocks[following].start_gather()

    def reduce(self, flat: FlatParameter) -> None:
        """Collective: reduce-scatter the gradients of a flat parameter; free its parameters: their backward is over."""
        super().reduce(flat)
        flat.free()

    def gather_root(self) -> None:
        """Collective: gather the embedding, final norm and head, for the whole step or evaluation."""
        if self.root is not None:
            self.root.start_gather()
            self.root.wait()

    def free_root(self) -> None:
        """Free the root's parameters, and those of a block that was gathered ahead and not used."""
        for flat_param in self.flat_params:
            flat_param.free()
