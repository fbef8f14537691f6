"""Data parallelism with one all-reduce per parameter: the solution, as it stands in minidist.simple.data_parallel.

The replicas stay equal because they start equal and each applies the same sum. Nothing is divided here: every loss
was divided by the token count of the global batch, so the sum over the ranks is the gradient of one process, also
with unequal parts. A rank that skips a parameter it did not use leaves the other ranks waiting. A reducer that gives
an unused parameter a gradient of zeros instead of None lets weight decay and momentum change it.

The sum over micro-batches is local: only the complete sum goes over the network, once per step instead of once per
micro-batch. The hook takes .grad away, because autograd would add the next gradient to the same tensor, which would
count the first micro-batch several times. Letting autograd accumulate, and reading .grad in the last micro-batch
only, fails if the last micro-batch does not use a parameter that an earlier one used: its hook does not run.

Usual wrong answers:
* calls add() when backward is over, when nothing is left to overlap with
* replaces the sums by other zeros in every step, beside the flat tensor of a subclass
* sums the parameters over the ranks instead of their gradients
* hooks the gradient before autograd writes .grad, and leaves it there
* sends all tensors in float32, which rounds large integers and float64
* leaves the buffers out of the broadcast
* the package's own
* sets all gradients to ones
* sets .grad to copies of the sums, so the gradients exist twice
* sums the counts of gradients in 8 bits, where 256 gradients are none
* sets num_added to 1 instead of counting
* sums in the dtype of the parameters, and rounds what the masters exist for
* exchanges who used what before reduce_sums, between the sums of a subclass that has launched some in backward
* exchanges the use of those parameters only of which this rank has masters, and other ranks have others
* leaves the last micro-batch out, on four ranks only
* broadcasts only the parameters that require a gradient
* drops the gradients of a rank that has fewer micro-batches than the others
* keeps .grad, so autograd adds each gradient to the earlier ones
* leaves .grad of the last step
* sets `.grad` of the parameters to None instead of that of the masters
* a rank that has added no gradient takes no part in finish
* sums in torch's default dtype
* overwrites the sum, so only the last micro-batch counts
* every hook uses the name of the last parameter
* divides by the number of ranks: a mean instead of the sum
* averages the starting values: equal on all ranks, but not those of rank 0
* divides by the number of micro-batches, although every loss is already divided
* multiplies the sums by 0 to clear them, which leaves NaN
* fails in finish if a parameter has no master on this rank, as with ZeRO
* gives each parameter a new tensor, which the reducer and the optimizer do not know
* replaces the sums by new tensors, which are no longer views of the flat tensor of a subclass
* the first gradient of each parameter is the only one that is added
* sums over the ranks nothing but who used what
* all-reduces in finish, where a subclass cannot replace it
* resets the sums in finish instead of clear, so the gradients of an aborted step leak into the next
* all-reduces every gradient of every micro-batch when it is added
* keeps the sums in a global dictionary, which two reducers share
* broadcasts the state_dict, which lacks the buffers that are not persistent
* does not reset the sums, so each step contains all earlier ones
* wrong on the third rank only
* sends one flag per element of every gradient
* a rank decides alone whether a parameter was used
* a parameter that no rank used gets a gradient of zeros
* a rank that did not use a parameter takes no part in its all-reduce
* takes the smallest flag, so .grad is None as soon as one rank did not use the parameter
* does not forget which parameters were used in earlier steps
* counts a parameter as used only if every micro-batch of the step used it
* takes rank 0 of the world, not of the group
* sets all gradients to zeros
* takes a sum of zeros for an unused parameter
* takes a gradient of zeros for an unused parameter
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from minidist.comm import Group, all_reduce, broadcast
from minidist.simple.data_parallel import Tensors
from minidist.simple.mixed_precision import copy_to_parameters


def broadcast_model(model: nn.Module, group: Group) -> None:
    """Collective: overwrite all parameters and buffers with those of group rank 0, so that the replicas start equal."""
    for tensor in (*model.parameters(), *model.buffers()):
        broadcast(tensor.data, 0, group)


def register_gradient_hooks(parameters: Mapping[str, nn.Parameter], add: Callable[[str, Tensor], None]) -> None:
    """Call `add(name, gradient)` inside backward, as soon as a parameter's gradient is complete. `.grad` stays None."""

    def take_gradient(name: str, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        add(name, gradient)

    for name, parameter in parameters.items():
        parameter.register_post_accumulate_grad_hook(partial(take_gradient, name))


class NaiveReducer:
    """Gradient reducer with one all-reduce per parameter, after backward; all others inherit its interface.

    parameters: what the model computes with, by name. masters: what the optimizer updates, by name: the parameters
    themselves, or wider copies of them (`mixed_precision.make_masters`); gradients are summed in their dtype. group:
    the ranks that have the same parameters and different tokens. num_micro_batches: how many gradients of each
    parameter come in a step.

    sums: for each master, the tensor that becomes its `.grad`. num_added: for each parameter, the number of gradients
    that this rank has added in this step.
    """

    def __init__(self, parameters: Tensors, masters: Tensors, group: Group, num_micro_batches: int = 1):
        self.parameters, self.masters, self.group = dict(parameters), dict(masters), group
        self.num_micro_batches = num_micro_batches
        self.sums = self.allocate_sums()
        self.clear()

    def allocate_sums(self) -> dict[str, Tensor]:
        """Return a tensor for the sum of each parameter's gradients, by name, in the parameter's shape."""
        return {name: torch.zeros_like(self.masters[name]) for name in self.parameters}

    def clear(self) -> None:
        """Forget all gradients; call it before every step."""
        self.num_added = dict.fromkeys(self.parameters, 0)
        for name, total in self.sums.items():
            total.zero_()
            self.masters[name].grad = None

    def add(self, name: str, gradient: Tensor) -> None:
        """Add the local gradient of one micro-batch to the sum of parameter `name`."""
        self.sums[name] += gradient
        self.num_added[name] += 1

    def finish(self) -> None:
        """Collective: complete the sums; set each master's `.grad`, to None if no rank used the parameter."""
        self.reduce_sums()
        used = [float(count > 0) for count in self.num_added.values()]
        num_ranks = torch.tensor(used, device=self.group.world.device)
        all_reduce(num_ranks, self.group)
        for name, uses in zip(self.num_added, num_ranks.tolist(), strict=True):
            if name in self.masters:
                self.masters[name].grad = self.sums[name] if uses else None

    def reduce_sums(self) -> None:
        """Collective: sum over the ranks all gradients that are not yet summed. A rank without data sends zeros."""
        for total in self.sums.values():
            all_reduce(total, self.group)

    def update_parameters(self) -> None:
        """Copy the masters to the parameters, which rounds them to the parameters' dtype."""
        copy_to_parameters(self.masters, self.parameters)

    def gather_root(self) -> None:
        """Called before the first forward of a step or an evaluation. Nothing to do here: ZeRO 3 gathers parameters."""

    def end_micro_batch(self) -> None:
        """Called after the backward of every micro-batch. Nothing to do here: ZeRO 2 and 3 reduce gradients."""

    def free_root(self) -> None:
        """Called after an evaluation. Nothing to do here: ZeRO 3 frees the parameters that are still gathered."""
