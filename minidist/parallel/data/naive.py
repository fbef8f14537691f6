"""The simplest gradient reducer: one all-reduce per parameter after backward, for parameters of one dtype without ZeRO.

It is the baseline for `BucketedReducer`, and the reducers of central and asynchronous servers inherit from it.
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
        """Drop the gradients of this step: set every `.grad` to None and the sums to zero."""
        super().clear_gradients()
        for total in self._sums.values():
            total.zero_()
        self._used = set[str]()
        self._ready = set[str]()
