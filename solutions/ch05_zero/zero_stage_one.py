"""ZeRO stage 1: update a shard, gather the parameters: the solution, as it stands in minidist.simple.zero.

An all-reduce is a reduce-scatter followed by an all-gather. Stage 1 puts the update between the two: reduce-scatter
the gradients, update one shard, all-gather the parameters. The number of bytes sent stays the same, and each rank
stores only its shard of the optimizer states, which take most of a model's memory.

The masters are slices of the shard, and the shard is a slice of the flat parameter, so the update itself writes the
buffer, and the all-gather only adds the other ranks' shards. With wider masters a rounding comes between. A rank
without a gradient sends zeros, since the others wait for its part; but zero is not None: AdamW would still apply
weight decay to a parameter that no rank has used. No rank can know that alone, so the ranks sum one flag per
parameter.

Usual wrong answers:
* all-reduces the flat gradient and takes its shard: the right values, for half as many bytes again
* divides by the number of ranks, although the loss is divided by the global count already
* lists the last block first
* the package's own
* clears the sums by a factor of zero, so NaN and infinities of an aborted step remain
* every gradient is one
* num_added says whether a gradient has been added, not how many
* writes wider masters to the shards only if it gathers these: stage 3 computes with the first parameters for ever
* keeps the local gradients after their reduction, until the next step
* gathers all parameters after the update in stage 3, too
* adds later gradients to the tensor of the first one, which is the caller's
* each micro-batch replaces the gradients of the one before
* keeps flat gradients in `local`, by flat parameter: stage 2 looks for the names of parameters there
* gathers the shards without writing the updated masters to them
* does not gather the updated shards: right on one rank only
* reduces after every micro-batch: the right values, for more bytes
* empties `local` only after all reductions: in stage 2 every later one would add the same gradients again
* clear keeps the local gradients of a step that was aborted before finish
* a second reduction of the step, as in stage 2, replaces the sum of the first
* shards the blocks only: the parameters outside have no masters and are not updated
* makes a root of no parameters, where all are in blocks
* every rank updates all elements, and has all optimizer states
* adds up the gradients of the micro-batches in their own dtype
* every gradient is zero
* a parameter whose gradients are all zero counts as unused: its masters get None, and AdamW no longer decays it
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minidist.comm import Group, all_gather, reduce_scatter
from minidist.simple.data_parallel import NaiveReducer, Tensors
from minidist.simple.zero import Blocks, FlatParameter


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
