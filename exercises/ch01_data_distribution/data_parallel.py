"""Data parallelism with one all-reduce per parameter.

Every rank has the whole model and its own samples. Write all of data parallelism: the broadcast that makes the replicas
equal, the hooks that take each gradient out of backward, and the reducer that adds up the gradients of a step's
micro-batches and sums them over the ranks.

broadcast_model(model, group): gives all parameters and buffers, in place, the values of the group's rank 0.
register_gradient_hooks(parameters, add): parameters that require a gradient, by name. From then on every backward calls
add(name, gradient) once for each parameter that it used, and leaves `.grad` None for the next micro-batch.
NaiveReducer(parameters, masters, group, num_micro_batches): the masters are what the optimizer updates, by the same
names: in this chapter the parameters themselves, from chapter 06 on wider copies, so sums have the masters' dtype. A
step calls clear(), then add() 0 or more times per parameter, then finish(). After it, masters[name].grad is the sum
over micro-batches and ranks, not the mean; it is None for a parameter that no rank used. Later reducers inherit from
this class and replace allocate_sums() and reduce_sums(), so add() adds to self.sums[name] in place, clear() zeroes
these tensors in place and sets each master's `.grad` to None, and finish() leaves the sums over the ranks to
self.reduce_sums(), before it exchanges who used what: a rank may have launched some sums already. In chapter 05 a rank
has masters of some parameters only, and other ranks have others: finish() leaves `.grad` of the others out, but all
ranks exchange the use of all parameters. __init__ and the last four methods stay.
Example with 2 ranks:
    rank 0   add("w", tensor([1., 2.])), add("w", tensor([10., 20.]))
    rank 1   add("w", tensor([5., 5.])), add("b", tensor([3.]))
    after finish(), on both ranks: w.grad is [16., 27.], b.grad is [3.], and c.grad is None

Checked: frozen parameters, buffers of any kind, and groups whose rank 0 is another rank of the world; the calls of
add(), with two models at once; exact sums on 1 to 5 and 7 ranks, in every floating dtype, also wider than the
gradients; ranks with different numbers of micro-batches, or none; parameters that some ranks, or none, use; several
steps, also an aborted one; that nothing is sent before finish(), and then at most the gradients and 16 bytes per
parameter; two training steps against one process, in float64 on 1 to 4 ranks; and subclasses with sums in one flat
tensor, or with other masters on each rank.

You may call:
    model.parameters(), model.buffers()   iterators over tensors; tensor.data: the same values, outside autograd
    broadcast(tensor, 0, group)   overwrites `tensor` on all ranks with that of group rank 0
    parameter.register_post_accumulate_grad_hook(hook)   backward calls hook(parameter) when it has written .grad
    partial(function, name)   a function that calls function(name, ...)
    all_reduce(tensor, group)   sums `tensor` in place over the ranks of the group
    torch.zeros_like(tensor), torch.tensor(list of numbers, device=self.group.world.device), Tensor.tolist()
    Tensor.zero_(), Tensor.add_(tensor), dict.fromkeys(names, 0)

Check it with: python -m exercises check data_parallel

Stub d1055902.
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
    raise NotImplementedError("broadcast every parameter and buffer")


def register_gradient_hooks(parameters: Mapping[str, nn.Parameter], add: Callable[[str, Tensor], None]) -> None:
    """Call `add(name, gradient)` inside backward, as soon as a parameter's gradient is complete. `.grad` stays None."""

    raise NotImplementedError("register a hook on each parameter")


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
        raise NotImplementedError("return zeros in the shape and dtype of each master, by name")

    def clear(self) -> None:
        """Forget all gradients; call it before every step."""
        raise NotImplementedError("forget everything that belongs to one step")

    def add(self, name: str, gradient: Tensor) -> None:
        """Add the local gradient of one micro-batch to the sum of parameter `name`."""
        raise NotImplementedError("add the gradient to the sum, and count it")

    def finish(self) -> None:
        """Collective: complete the sums; set each master's `.grad`, to None if no rank used the parameter."""
        raise NotImplementedError("reduce the sums, find out which parameters any rank used, and set .grad")

    def reduce_sums(self) -> None:
        """Collective: sum over the ranks all gradients that are not yet summed. A rank without data sends zeros."""
        raise NotImplementedError("sum each parameter's gradient over the ranks")

    def update_parameters(self) -> None:
        """Copy the masters to the parameters, which rounds them to the parameters' dtype."""
        copy_to_parameters(self.masters, self.parameters)

    def gather_root(self) -> None:
        """Called before the first forward of a step or an evaluation. Nothing to do here: ZeRO 3 gathers parameters."""

    def end_micro_batch(self) -> None:
        """Called after the backward of every micro-batch. Nothing to do here: ZeRO 2 and 3 reduce gradients."""

    def free_root(self) -> None:
        """Called after an evaluation. Nothing to do here: ZeRO 3 frees the parameters that are still gathered."""
