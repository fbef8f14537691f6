"""ZeRO stage 1: update a shard, gather the parameters: the solution, as it stands in minidist.zero.simple.

An all-reduce is a reduce-scatter followed by an all-gather. Stage 1 puts the update between the two: reduce-scatter
the gradients, update one shard, all-gather the parameters. The number of bytes sent stays the same, and each rank
stores only its shard of the optimizer states, which take most of a model's memory.

The masters are slices of the shard, and the shard is a slice of the flat parameter, so the update itself writes the
buffer, and the all-gather only adds the other ranks' shards. A rank without a gradient sends zeros, since the others
wait for its part; but zero is not None: AdamW would still apply weight decay to a parameter that no rank has used. No
rank can know that alone, so the ranks sum one flag per parameter.

Usual wrong answers:
* all-reduces the gradients, although a rank needs only its shard
* divides the sum by the number of ranks: the losses were divided by the number of samples already
* the package's own
* every gradient is one
* keeps a second copy of all parameters
* gathers the parameters before they are updated
* also gathers the summed gradients, which no rank needs
* each gradient replaces that of the micro-batch before
* ignores a gradient that comes too late
* each rank updates its shard with its own gradient
* shards nothing: every rank all-reduces, updates the whole parameters and has the moments of all
* no rank sends its updated shard to the others
* the flat parameters begin with the first block, not with the last
* a rank without gradients sends nothing, and the others wait
* reduces after every micro-batch, and sends the gradients several times
* adds the update of its shard to the own parameters everywhere, instead of gathering values
* does not clear the gradients: each step adds to the one before
* decides by its own uses whether a parameter was used
* a parameter that no rank used has a gradient of zeros, and AdamW decays it
* updates before the gradients are reduced: in the first step nothing changes
* never forgets which parameters were used in earlier steps
* launches the reduce-scatter and reads its output before it has ended
* keeps the flat gradients of all parameters until the end of the step
* every gradient is zero
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
        others, self.group = trainable_parameters(named_parameters(model)), group
        by_block = [{name: others.pop(name) for name in names if name in others} for names in blocks.values()]
        self.flat_params = [FlatParameter(some, group) for some in [*reversed(by_block), others]]
        self.masters = {name: flat.shard[place] for flat in self.flat_params for name, place in flat.slices.items()}
        self.master_specs = {name: spec for flat in self.flat_params for name, spec in flat.specs.items()}
        self.clear_gradients()
        self._parameters = self.masters  # the tensors with gradients, for the methods of GradientReducer

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Collective: reduce, update and gather. optimizer: of the `masters`."""
        self.finish_reductions()
        optimizer.step()
        self.clear_gradients()
        self.gather_params()

    def accumulate(self, name: str, grad: Tensor) -> None:
        if name in self.ready:
            raise RuntimeError(f"a gradient of {name} came after mark_ready({name!r}), when it may have been reduced")
        self.grads[name] = self.grads[name].add_(grad) if name in self.grads else grad
        self.used.add(name)

    def mark_ready(self, name: str) -> None:
        self.ready.add(name)

    def reduce_until(self, number: int) -> None:
        """Collective: reduce the first `number` flat gradients, except those that have been reduced already."""
        for flat in self.flat_params[self.num_reduced : number]:
            self.ready.update(flat.parameters)
            flat_grad, shard = flat.flatten(self.grads), torch.empty_like(flat.shard)
            reduce_scatter(shard, flat_grad, self.group)
            flat.grad = shard if flat.grad is None else flat.grad.add_(shard)
        self.num_reduced = max(self.num_reduced, number)

    def finish_reductions(self) -> None:
        """Collective: reduce all gradients; set `.grad` of the masters, to None for a parameter that no rank used."""
        self.reduce_until(0 if self.reduces_each_micro_batch else len(self.flat_params))
        for flat in self.flat_params:
            uses = torch.tensor([float(name in self.used) for name in flat.parameters], device=flat.full.device)
            all_reduce(uses, self.group)
            used = dict(zip(flat.parameters, uses.tolist(), strict=True))
            for name, place in flat.slices.items():
                self.masters[name].grad = flat.grad[place] if used[name] else None

    def gather_params(self) -> None:
        for flat in reversed(self.flat_params):  # in the order of forward
            all_gather(flat.full, flat.shard, self.group)

    def clear_gradients(self) -> None:
        self.grads, self.used, self.ready, self.num_reduced = {}, set(), set(), 0
        for tensor in (*self.flat_params, *self.masters.values()):
            tensor.grad = None
