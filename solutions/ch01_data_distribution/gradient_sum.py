"""One all-reduce per parameter: the solution, as it stands in minidist.parallel.data.reducer.

The replicas stay equal because each applies the same sum. Nothing is divided here: every loss was divided by the
token count of the global batch, so the sum over the ranks is the gradient of one process, also with unequal parts. A
rank that skips a parameter it did not use leaves the other ranks waiting. A reducer that gives an unused parameter a
gradient of zeros instead of None lets weight decay and momentum change it.

Usual wrong answers:
* the package's own reducer under the learner's name
* ones, whatever was added
* all take the gradient of the first rank, right only when ranks are equal
* the sum is taken in float32, whatever the parameter is
* wrong on four ranks only, where the sum is divided
* all gradients are gathered and then added, n times the traffic
* the sums of one step are still there in the next
* wrong on one rank only, the third
* four messages per parameter, though two of them are tiny
* the sum is divided by the number of ranks, though every loss was divided already
* every rank keeps its own gradient, right only when there is one rank
* the parameter is reduced as well, so replicas move without an optimizer
* every gradient is reduced a second time for nothing
* a rank decides by itself whether the parameter was used
* a parameter that nobody used gets a gradient of zeros
* a rank that did not use a parameter does not take part, and the others wait for ever
* zeros
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from minidist.comm import Group, all_reduce
from minidist.parallel.data.reducer import GradientReducer, group_of
from minidist.parameters import ParamSpecs


class NaiveReducer(GradientReducer):
    """One all-reduce per parameter after backward. The simple version of `BucketedReducer`, with the same results."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], specs: ParamSpecs, groups: Iterable[Group]):
        super().__init__(parameters, specs)
        groups = list(groups)
        self._groups = {name: group_of(specs[name], groups) for name in self._parameters}
        self._sums: dict[str, Tensor] = {}
        self._ready: set[str] = set()

    def add(self, name: str, grad: Tensor) -> None:
        """Add a local gradient to those of earlier micro-batches."""
        if name in self._ready:
            raise RuntimeError(f"a gradient of {name} came after ready({name!r})")
        if name in self._sums:
            self._sums[name].add_(grad)
        else:
            self._sums[name] = grad.detach().clone(memory_format=torch.contiguous_format)

    def ready(self, name: str) -> None:
        self._ready.add(name)  # nothing is sent before `finish`

    def finish(self) -> None:
        """Sum over the group: every `.grad` holds the sum, or None for a parameter that no rank of the group used."""
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

    def clear(self) -> None:
        self._sums, self._ready = {}, set()
        for parameter in self._parameters.values():
            parameter.grad = None

    def scale(self, factor: float) -> None:
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
