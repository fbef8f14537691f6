"""ZeRO stage 1: update a shard, gather the parameters.

In stage 1 each rank has the optimizer states of its shards only. Write the class that sums the gradients of all ranks
into shards, lets any torch optimizer update the rank's shards, and gathers the updated parameters.

model: its parameters become views of flat parameters. blocks: {layer: names of its parameters}. Autograd hooks call
accumulate(name, grad), several times per step and parameter, and then mark_ready(name). masters: {name: (m,) slice of a
shard}; after finish_reductions `.grad` is None or (m,), and any torch.optim optimizer of the masters may step.
Example: 2 ranks, no block, one parameter w = [1, 2, 3], SGD with learning rate 1; the flat parameter is [1, 2, 3, 0].
    accumulate("w", ...)   [1, 1, 1] on rank 0, [1, 2, 3] on rank 1
    masters["w"]           rank 0: [1, 2] with the gradient [2, 3], rank 1: [3] with the gradient [4]
    after step             w is [-1, -1, -1] on both ranks, and no gradient is left

Checked: parameters after three steps on 1 to 4 ranks against AdamW on the whole model in float64, with unequal
micro-batches, a rank without samples, a parameter that only one rank uses, one that none uses (its gradient is None)
and ranks that start from other values; the gradients of the masters; the moments of each rank; bytes sent: one
reduce-scatter and one all-gather per flat parameter and step, and an all-reduce of one flag per parameter; memory.

You may call:
    FlatParameter(parameters, group)   as in exercise 5.2: full, shard, slices, specs, flatten(tensors), grad
    reduce_scatter(output, input, group)   sums (size * n,) over the ranks; output (n,) gets this rank's shard
    all_gather(output, input, group)   concatenates the (n,) of all ranks in (size * n,), which may contain the input
    all_reduce(tensor, group)   replaces the tensor by its sum over the ranks
    named_parameters(model), trainable_parameters(parameters)   dictionaries by name; optimizer.step()

Check it with: python -m exercises check zero_stage_one

Stub 58c219df.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from minidist.comm import Group, all_gather, all_reduce, reduce_scatter
from minidist.parallel.data.reducer import GradientReducer, trainable_parameters
from minidist.parameters import named_parameters
from minidist.zero.simple import FlatParameter


class ZeroStage1(GradientReducer):
    """Each rank updates its shard of every flat parameter only, and so has optimizer states for this shard only.

    blocks: the layers of `model` in the order of forward, each with the names of the parameters that only it uses.
    flat_params: of the blocks, the last one first, then of all other parameters. masters: slices of this rank's shards
    by name, for the optimizer. ready: names after `mark_ready`. num_reduced: how many flat gradients are reduced.
    """

    def __init__(self, model: nn.Module, blocks: Mapping[nn.Module, Sequence[str]], group: Group):
        raise NotImplementedError("make the flat parameters, masters and specs")

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Collective: reduce, update and gather. optimizer: of the `masters`."""
        raise NotImplementedError("reduce, update and gather")

    def accumulate(self, name: str, grad: Tensor) -> None:
        raise NotImplementedError("keep the gradient, or add it to the earlier one")

    def mark_ready(self, name: str) -> None:
        raise NotImplementedError("note the name")

    def reduce_until(self, number: int) -> None:
        """Collective: reduce the first `number` flat gradients, except those that have been reduced already."""
        raise NotImplementedError("reduce the flat gradients up to this number")

    def finish_reductions(self) -> None:
        """Collective: reduce all gradients; set `.grad` of the masters, to None for a parameter that no rank used."""
        raise NotImplementedError("reduce all gradients, and give each master its own")

    def gather_params(self) -> None:
        raise NotImplementedError("gather the updated shards")

    def clear_gradients(self) -> None:
        raise NotImplementedError("drop all gradients")
