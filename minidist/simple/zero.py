"""ZeRO: data parallelism whose ranks share optimizer states, gradients and parameters instead of replicating them.

Rajbhandari et al. 2020, arXiv 1910.02054, section 5. The parameters of each block are concatenated in one flat
parameter, of which every one of n ranks has a shard:

    stage 1   the optimizer states (and masters) of the shard only; gradients are reduce-scattered after backward
    stage 2   and gradients: each block's flat gradient is reduce-scattered, and freed, when its backward is over
    stage 3   and parameters: each block's flat parameter is all-gathered when it is needed, and freed afterwards

The interface is that of the gradient reducers in `data_parallel`.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from minidist.comm import Group, Handle, all_gather, all_reduce, reduce_scatter


class FlatParameter:
    """Parameters concatenated in one flat buffer, which ends in padding and is cut into one shard per rank.

    parameters: by name; each becomes a view of the buffer. masters: their values in the dtype in which the optimizer
    updates them, by name. group: rank r has shard r.

    full: (n * size,), the buffer. shard: (size,), this rank's shard of it. master: (size,), the same in the masters'
    dtype; the shard itself if the dtypes are equal. places: for each parameter with elements in this shard, their slice
    of the shard and the first one's offset in the flattened parameter. grad: (size,), this rank's shard of the summed
    gradient; None before the first reduction.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], masters: Mapping[str, Tensor], group: Group):
        self.parameters, self.group = dict(parameters), group
        self.numel = sum(parameter.numel() for parameter in parameters.values())
        self.shard_size = -(-self.numel // group.size)
        first_master, first_parameter = masters[next(iter(parameters))], next(iter(parameters.values()))
        values = self.flatten({name: masters[name] for name in parameters}, first_master.dtype)
        self.full = values.to(first_parameter.dtype)
        self.shard = self.full.chunk(group.size)[group.rank]
        is_wider = values.dtype != self.full.dtype
        self.master = values.chunk(group.size)[group.rank].clone() if is_wider else self.shard
        self.places: dict[str, tuple[slice, int]] = {}
        self.grad: Tensor | None = None
        self.gathering: Handle | None = None
        first, end = group.rank * self.shard_size, (group.rank + 1) * self.shard_size
        offset = 0
        for name, parameter in parameters.items():
            parameter.data = self.full[offset : offset + parameter.numel()].view(parameter.shape)
            start, stop = max(offset, first), min(offset + parameter.numel(), end)
            if start < stop:
                self.places[name] = slice(start - first, stop - first), start - offset
            offset += parameter.numel()

    def flatten(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Concatenate one tensor per parameter, zeros for those that are missing, and the padding: (n * size,)."""
        device = next(iter(self.parameters.values())).device
        flat = torch.zeros(self.group.size * self.shard_size, dtype=dtype, device=device)
        offset = 0
        for name, parameter in self.parameters.items():
            if name in tensors:
                flat[offset : offset + parameter.numel()] = tensors[name].detach().flatten()
            offset += parameter.numel()
        return flat

    def detach_shard(self) -> None:
        """Give the shard memory of its own, so that the buffer's can be freed."""
        is_master = self.master is self.shard
        self.shard = self.shard.clone()
        if is_master:
            self.master = self.shard

    @property
    def is_gathered(self) -> bool:
        """Whether the buffer has memory, so that the parameters have values."""
        return self.full.untyped_storage().size() > 0

    def start_gather(self) -> None:
        """Collective: give the buffer memory again, and start the all-gather of its shards; its views become valid."""
        if not self.is_gathered:
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


class ZeroStage1:
    """Each rank updates its shard of every flat parameter, and so has optimizer states of this shard only.

    parameters, masters: by name, as in `data_parallel.NaiveReducer`. blocks: the layers of the model, in the order of
    forward, each with the names of its parameters; all other parameters, of the embedding, the final norm and the head,
    are in the root. group: the ranks that have the same parameters and different tokens.

    root: the flat parameter of the root, None on a pipeline stage without one. blocks: those of the blocks. masters:
    this rank's elements of each parameter, flat, which the optimizer updates.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        masters: Mapping[str, Tensor],
        blocks: Mapping[nn.Module, Sequence[str]],
        group: Group,
    ):
        def make_flat(names: Sequence[str]) -> FlatParameter:
            return FlatParameter({name: parameters[name] for name in names}, masters, group)

        self.group, self.names = group, list(parameters)
        in_blocks = {name for names in blocks.values() for name in names}
        outside = [name for name in parameters if name not in in_blocks]
        self.root = make_flat(outside) if outside else None
        self.blocks = [make_flat(names) for names in blocks.values()]
        self.flat_params = [*self.blocks, *([self.root] if self.root else [])]
        self.masters = {
            name: flat.master[place] for flat in self.flat_params for name, (place, _) in flat.places.items()
        }
        self.dtype = self.flat_params[0].master.dtype
        self.device = self.flat_params[0].full.device
        self.clear()

    def clear(self) -> None:
        """Forget all gradients; call it before every step."""
        self.gradients: dict[str, Tensor] = {}  # local, not yet reduced
        self.used: set[str] = set()
        for flat in self.flat_params:
            flat.grad = None
        for master in self.masters.values():
            master.grad = None

    def add(self, name: str, gradient: Tensor) -> None:
        """Add the local gradient of one micro-batch to the sum of parameter `name`."""
        self.used.add(name)
        if name in self.gradients:
            self.gradients[name] += gradient
        else:
            self.gradients[name] = gradient.to(self.dtype, copy=True)

    def reduce(self, flat: FlatParameter) -> None:
        """Collective: reduce-scatter the local gradients of a flat parameter, and add the result to its `grad`."""
        mine = {name: self.gradients.pop(name) for name in flat.parameters if name in self.gradients}
        summed = torch.empty(flat.shard_size, dtype=self.dtype, device=self.device)
        reduce_scatter(summed, flat.flatten(mine, self.dtype), self.group)
        flat.grad = summed if flat.grad is None else flat.grad + summed

    def end_micro_batch(self) -> None:
        """Called after the backward of every micro-batch; stages 2 and 3 reduce then."""

    def finish(self) -> None:
        """Collective: reduce what is left; set `.grad` of each master, to None if no rank used the parameter."""
        self.reduce_remaining()
        used = torch.tensor([float(name in self.used) for name in self.names], device=self.device)
        all_reduce(used, self.group)
        num_ranks = dict(zip(self.names, used.tolist(), strict=True))
        for flat in self.flat_params:
            for name, (place, _) in flat.places.items():
                self.masters[name].grad = flat.grad[place] if num_ranks[name] else None

    def reduce_remaining(self) -> None:
        """Collective: reduce all flat parameters, in the same order on all ranks."""
        for flat in self.flat_params:
            self.reduce(flat)

    @torch.no_grad()
    def update_parameters(self) -> None:
        """Collective: round the masters to the parameters' dtype, and all-gather the updated shards."""
        self.update_shards()
        for flat in self.flat_params:
            all_gather(flat.full, flat.shard, self.group)

    def update_shards(self) -> None:
        """Copy the masters to the shards of the flat parameters."""
        for flat in self.flat_params:
            if flat.master is not flat.shard:
                flat.shard.copy_(flat.master)

    def gather_root(self) -> None:
        """Collective: called before the first forward of a step or an evaluation; stage 3 gathers then."""

    def free_root(self) -> None:
        """Called after the last backward of a step, or after an evaluation; stage 3 frees then."""


class ZeroStage2(ZeroStage1):
    """Stage 1 that reduces the gradients of each block as soon as its backward is over, and then frees them.

    So a rank never has the unreduced gradients of more than one block, but sends them once per micro-batch. The root's
    are reduced at the end of the step: the gradient of an embedding that another pipeline stage shares is complete
    then.
    """

    def clear(self) -> None:
        """Forget all gradients; call it before every step."""
        super().clear()
        self.next_block = len(self.blocks) - 1  # backward comes from the last block to the first

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a local gradient; reduce the block that backward has just left, if this was the last of its gradients.

        Every rank reduces the blocks in the same order, from the last one on.
        """
        super().add(name, gradient)
        if self.next_block >= 0 and self.gradients.keys() >= self.blocks[self.next_block].parameters.keys():
            self.reduce_next_block()

    def reduce_next_block(self) -> None:
        """Collective: reduce the block whose turn it is."""
        self.reduce(self.blocks[self.next_block])
        self.next_block -= 1

    def end_micro_batch(self) -> None:
        """Collective: reduce the blocks that have not got all their gradients in this micro-batch."""
        while self.next_block >= 0:
            self.reduce_next_block()
        self.next_block = len(self.blocks) - 1

    def reduce_remaining(self) -> None:
        """Collective: reduce the root's gradients."""
        if self.root is not None:
            self.reduce(self.root)


class ZeroStage3(ZeroStage2):
    """Stage 2 that also gathers each block's parameters before its forward and its backward, and frees them after.

    prefetch: start the all-gather of the next block while this one computes.
    """

    def __init__(self, parameters, masters, blocks, group, prefetch: bool = True):
        super().__init__(parameters, masters, blocks, group)
        self.prefetch = prefetch
        for flat in self.flat_params:
            flat.detach_shard()
            flat.free()
        self.masters = {
            name: flat.master[place] for flat in self.flat_params for name, (place, _) in flat.places.items()
        }
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
        """Collective: reduce-scatter the gradients of a flat parameter; then its parameters are not needed any more."""
        super().reduce(flat)
        flat.free()

    @torch.no_grad()
    def update_parameters(self) -> None:
        """Round the masters to the shards; each block is gathered when it is needed."""
        self.update_shards()

    def gather_root(self) -> None:
        """Collective: gather the embedding, final norm and head, for the whole step or evaluation."""
        if self.root is not None:
            self.root.start_gather()
            self.root.wait()

    def free_root(self) -> None:
        """Free the root's parameters, and those of a block that was gathered ahead and not used."""
        for flat in self.flat_params:
            flat.free()
