"""ZeRO stage 1: update a shard, gather the parameters.

In stage 1 each rank has the optimizer states of its shards only. Write the gradient reducer that sums the gradients of
all ranks into shards, gives them to the masters that an optimizer updates, and gathers the updated parameters.

parameters, masters: {name: tensor}. blocks: {layer: names of its parameters}; the names in no block belong to the root.
Each block is one FlatParameter and the root another; `blocks` lists the former, in order, `root` is None if every
parameter is in a block, `flat_params` lists all, in any order that is the same on all ranks. masters, in NaiveReducer:
{name: its slice of a flat parameter's `master`}, only of parameters in this rank's shards. The trainer calls, in this
order: clear; add, for each micro-batch; finish (of NaiveReducer: calls reduce_sums, sums one flag per parameter over
the ranks, and gives each master its sum as `.grad`, or None if no rank used the parameter); the optimizer's step;
update_parameters. Stage 2 inherits from your class and reduces a block several times per step: `reduce` takes the
block's gradients out of `local`, and adds their sum to its `grad`. `clear` also begins a step after one that was
aborted before finish. If shards_parameters is True, as in stage 3 (exercise 5.5), update_parameters writes the shards,
frees every flat parameter, whose values are old, and gathers none.
Example: 2 ranks, no block, one parameter w = [1, 2, 3], SGD with learning rate 1; the flat parameter is [1, 2, 3, 0].
    add("w", ...)             [1, 1, 1] on rank 0, [1, 2, 3] on rank 1: each keeps its own in `local`
    finish()                  the masters' gradients are [2, 3] on rank 0 and [4] on rank 1; `local` is empty
    the optimizer             the masters become [-1, -1] and [-1]
    update_parameters()       w is [-1, -1, -1] on both ranks

Checked: parameters after three steps on 1 to 4 ranks against AdamW on the whole model in float64, with unequal
micro-batches, a rank without samples, a parameter that only one rank uses, one that none uses, and ranks that start
from different values, which the first all-gather makes equal; root, blocks and flat_params; `local` and the sums when a
block is reduced twice, and after an aborted step; the gradients of the masters, None after clear; sums and updates in
the masters' dtype, if it is wider; that `add` leaves the given gradient unchanged; update_parameters of a subclass with
shards_parameters, also with wider masters; the moments of each rank; bytes sent: one reduce-scatter and one all-gather
per flat parameter and step; memory: no full gradient stays after finish; and up to 7 ranks, and a group of only some
ranks.

You may call:
    FlatParameter(parameters, masters, group, own_shard)   as in exercise 5.2; own_shard is self.shards_parameters
    flat.full, flat.shard, flat.master, flat.grad, flat.places, flat.parameters   its attributes
    flat.flatten(tensors, like), flat.free()   its methods
    reduce_scatter(output, input, group)   sums (n * size,) over the n ranks; output (size,) gets this rank's shard
    all_gather(output, input, group)   concatenates the (size,) of all ranks in (n * size,), which may contain the input
    super().__init__(parameters, masters, group)   of NaiveReducer: calls allocate_sums() and clear()
    self.sums   {name: what became of allocate_sums}; super().clear() sets them to zero, and self.num_added to 0
    self.num_added[name]   how many gradients `add` has added in this step; 0: this rank did not use the parameter

Check it with: python -m exercises check zero_stage_one

Stub bc5e408c.
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
        raise NotImplementedError("make the flat parameters of the blocks and of the root, and the masters")

    def allocate_sums(self) -> dict[str, Tensor]:
        """Return each master's slice of the gradient of its flat parameter, by name."""
        raise NotImplementedError("return the place of each master's gradient")

    def clear(self) -> None:
        """Forget all gradients; call it before every step."""
        raise NotImplementedError("forget the sums and the local gradients")

    def add(self, name: str, gradient: Tensor) -> None:
        """Add the local gradient of one micro-batch to the sum of parameter `name`."""
        raise NotImplementedError("count the gradient, and keep it or add it to the earlier ones")

    def reduce(self, flat: FlatParameter) -> None:
        """Collective: reduce-scatter the local gradients of a flat parameter, and add the result to its `grad`."""
        raise NotImplementedError("reduce the gradients of one flat parameter")

    def reduce_sums(self) -> None:
        """Collective: reduce all flat parameters, in the same order on all ranks."""
        raise NotImplementedError("reduce all of them")

    @torch.no_grad()
    def update_parameters(self) -> None:
        """Collective: round the masters to the shards, and all-gather these; stage 3 gathers them when needed."""
        raise NotImplementedError("write the masters to the shards, and gather these")
