"""One all-reduce per parameter.

After backward, each rank holds the gradients of its own samples. Write a gradient reducer that adds up the gradients of
a step's micro-batches, and then sums them over the ranks with one all-reduce per parameter.

NaiveReducer(parameters, specs, groups): parameters are nn.Parameter by name; find_gradient_group(specs[name], groups)
returns the process group that sums a gradient. super().__init__ sets self._parameters: those that require a gradient.
In each step accumulate(name, grad) is called 0 or more times per parameter, grad in the parameter's shape and dtype;
then mark_ready(name), except for parameters that this rank did not use; then finish_reductions() and clear_gradients().
After finish_reductions(), `.grad` is the sum, not the mean; it is None for a parameter that no rank used.
Example with 2 ranks:
    rank 0   accumulate("w", tensor([1., 2.])), accumulate("w", tensor([10., 20.])), mark_ready("w")
    rank 1   accumulate("w", tensor([5., 5.])), mark_ready("w"), accumulate("b", tensor([3.])), mark_ready("b")
    after finish_reductions(), on both ranks: w.grad is [16., 27.], b.grad is [3.], and c.grad is None

Checked: exact sums on 1 to 5 and 7 ranks, on groups of some of the ranks, in every floating dtype; ranks with different
values and numbers of micro-batches; parameters that some ranks, or none, use; several steps, also an aborted one; that
nothing is sent before finish_reductions(), and then at most the gradient and 16 bytes per parameter; RuntimeError by
accumulate() after mark_ready().

You may call:
    find_gradient_group(spec, groups)   the process group that sums the gradient of a parameter with this spec
    all_reduce(tensor, group)   sums `tensor` in place over the ranks of the group; all_reduce(tensor, group, "max")
    self.allocate_sums()   zeros in the shape of each parameter, by name
    super().clear_gradients()   sets `.grad` of every parameter to None
    torch.tensor([number], device=device), Tensor.item(), Tensor.add_(tensor), Tensor.zero_()

Check it with: python -m exercises check gradient_sum

Stub 4923cb7c.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from minidist.comm import Group, all_reduce
from minidist.parallel.data.reducer import GradientReducer, find_gradient_group
from minidist.parameters import ParamSpecs


class NaiveReducer(GradientReducer):
    """Gradient reducer of data parallelism with one all-reduce per parameter, after backward.

    specs: the parameters' specs. groups: these must include the group of each parameter's replicas.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], specs: ParamSpecs, groups: Collection[Group]):
        super().__init__(parameters, specs)
        raise NotImplementedError("find the group of each parameter; no gradient has been added yet")

    def allocate_sums(self) -> dict[str, Tensor]:
        """Return a tensor of zeros for the gradient of each parameter, by name, in the parameter's shape."""
        return {name: p.new_zeros(p.shape) for name, p in self._parameters.items()}

    def accumulate(self, name: str, grad: Tensor) -> None:
        """Add a local gradient of parameter `name` to the sum of earlier micro-batches."""
        raise NotImplementedError("add the gradient to the sum of this step")

    def mark_ready(self, name: str) -> None:
        """Reject further gradients of parameter `name` in this step."""
        raise NotImplementedError("from now on, refuse gradients of this parameter")

    def finish_reductions(self) -> None:
        """Collective: all-reduce the gradients; set `.grad` to their sums, to None if no rank used the parameter."""
        raise NotImplementedError("set .grad to the sum over the group, or to None if no rank used the parameter")

    def clear_gradients(self) -> None:
        raise NotImplementedError("forget everything that belongs to this step")
