"""One all-reduce per parameter: the solution, as it stands in minidist.parallel.data.reducer.

The replicas stay equal because each applies the same sum. Nothing is divided here: every loss was divided by the
token count of the global batch, so the sum over the ranks is the gradient of one process, also with unequal parts. A
rank that skips a parameter it did not use leaves the other ranks waiting. A reducer that gives an unused parameter a
gradient of zeros instead of None lets weight decay and momentum change it.

Usual wrong answers:
* calls the package's reducer
* returns ones as gradients
* broadcasts the gradient of the first rank, which is right only for equal ranks
* reduces in float32, whatever the parameter's dtype
* divides the sum, on four ranks only
* all-gathers the gradients and sums locally, with n times the traffic
* does not clear the sums after a step
* wrong on the third rank only
* sends four messages per parameter
* divides by the number of ranks, although every loss is already divided
* keeps the local gradients, which is right only for one rank
* also reduces the parameter, so replicas change without the optimizer
* reduces every gradient a second time, for no purpose
* a rank decides alone whether a parameter was used
* a parameter that no rank used gets a gradient of zeros
* a rank that did not use a parameter skips the collective, and the others wait for ever
* returns zeros as gradients
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from minidist.comm import Group, all_reduce
from minidist.parallel.data.reducer import GradientReducer, find_gradient_group
from minidist.parameters import ParamSpecs


class NaiveReducer(GradientReducer):
    """Gradient reducer of data parallelism with one all-reduce per parameter, after backward.

    specs: the parameters' specs. groups: these must include the group of each parameter's replicas.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], specs: ParamSpecs, groups: Iterable[Group]):
        super().__init__(parameters, specs)
        groups = list(groups)
        self._groups = {name: find_gradient_group(specs[name], groups) for name in self._parameters}
        self._sums: dict[str, Tensor] = {}
        self._ready: set[str] = set()

    def accumulate(self, name: str, grad: Tensor) -> None:
        """Add a local gradient of parameter `name` to the sum of earlier micro-batches; `grad` is copied."""
        if name in self._ready:
            raise RuntimeError(f"a gradient of {name} came after mark_ready({name!r})")
        if name in self._sums:
            self._sums[name].add_(grad)
        else:
            self._sums[name] = grad.detach().clone(memory_format=torch.contiguous_format)

    def mark_ready(self, name: str) -> None:
        """Reject further gradients of `name` in this step; the reduction starts later, in `finish_reductions`."""
        self._ready.add(name)

    def finish_reductions(self) -> None:
        """Collective: all-reduce the gradients; set `.grad` to their sums, to None if no rank used the parameter."""
        for name, parameter in self._parameters.items():
            group = self._groups[name]
            # Every rank must take part in every collective: one that did not use the parameter sends zeros.
            used = torch.tensor([float(name in self._sums)], device=parameter.device)
            total = self._sums.get(name)
            if total is None:
                total = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            all_reduce(total, group)
            all_reduce(used, group, "max")
            parameter.grad = total.view_as(parameter) if used.item() else None
        self._sums, self._ready = {}, set()

    def clear_gradients(self) -> None:
        self._sums, self._ready = {}, set()
        for parameter in self._parameters.values():
            parameter.grad = None

    def scale_gradients(self, factor: float) -> None:
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
