"""One all-reduce per parameter: the solution, as it stands in minidist.parallel.data.simple.

The replicas stay equal because each applies the same sum. Nothing is divided here: every loss was divided by the
token count of the global batch, so the sum over the ranks is the gradient of one process, also with unequal parts. A
rank that skips a parameter it did not use leaves the other ranks waiting. A reducer that gives an unused parameter a
gradient of zeros instead of None lets weight decay and momentum change it.

The method allocate_sums exists for the next exercise, whose reducer keeps all sums in one flat buffer and inherits
the rest.

Usual wrong answers:
* accepts gradients that come after mark_ready()
* calls the package's reducer
* returns ones as gradients
* broadcasts the gradient of the first rank, which is right only for equal ranks
* reduces in float32, whatever the parameter's dtype
* divides the sum, on four ranks only
* all-gathers the gradients and sums locally, with n times the traffic
* clear_gradients() leaves .grad, to which autograd adds the next gradient
* all-reduces in the order in which this rank used the parameters, which differs by rank
* does not clear the sums after a step
* clears the sums in finish_reductions(), so those of an aborted step remain
* every micro-batch overwrites the gradient of the one before
* wrong on the third rank only
* sends four messages per parameter
* divides by the number of ranks, although every loss is already divided
* keeps the local gradients, which is right only for one rank
* starts with the parameters that this rank used, so ranks call the all-reduces in different orders
* also reduces the parameter, so replicas change without the optimizer
* all-reduces in accumulate(), once per micro-batch
* reduces every gradient a second time, for no purpose
* keeps the sums in the class, so that all reducers share them
* a rank decides alone whether a parameter was used
* a parameter that no rank used gets a gradient of zeros
* a rank that did not use a parameter skips the collective, and the others wait for ever
* a parameter counts as used for ever after its first gradient
* returns zeros as gradients
* takes a gradient of zeros for an unused parameter
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
        self._groups = {name: find_gradient_group(specs[name], groups) for name in self._parameters}
        self._sums = self.allocate_sums()
        self.clear_gradients()

    def allocate_sums(self) -> dict[str, Tensor]:
        """Return a tensor of zeros for the gradient of each parameter, by name, in the parameter's shape."""
        return {name: p.new_zeros(p.shape) for name, p in self._parameters.items()}

    def accumulate(self, name: str, grad: Tensor) -> None:
        """Add a local gradient of parameter `name` to the sum of earlier micro-batches."""
        if name in self._ready:
            raise RuntimeError(f"a gradient of {name} came after mark_ready({name!r}): it may be in flight")
        self._sums[name].add_(grad)
        self._used.add(name)

    def mark_ready(self, name: str) -> None:
        """Reject further gradients of parameter `name` in this step."""
        self._ready.add(name)

    def finish_reductions(self) -> None:
        """Collective: all-reduce the gradients; set `.grad` to their sums, to None if no rank used the parameter."""
        for name, parameter in self._parameters.items():
            # Every rank must take part in every collective: one that did not use the parameter sends zeros.
            used = torch.tensor([float(name in self._used)], device=parameter.device)
            all_reduce(self._sums[name], self._groups[name])
            all_reduce(used, self._groups[name])
            parameter.grad = self._sums[name] if used.item() else None

    def clear_gradients(self) -> None:
        super().clear_gradients()
        for total in self._sums.values():
            total.zero_()
        self._used, self._ready = set[str](), set[str]()
