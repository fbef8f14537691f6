"""One all-reduce per parameter.

Write the missing lines of NaiveReducer; its docstring specifies the result.
You may call: all_reduce, torch.tensor, torch.zeros_like.
Check it with: python -m exercises check gradient_sum

Stub 4f551625.
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
            raise NotImplementedError("set .grad to the sum over the group, or to None if no rank used the parameter")
        self._sums, self._ready = {}, set()

    def clear_gradients(self) -> None:
        self._sums, self._ready = {}, set()
        for parameter in self._parameters.values():
            parameter.grad = None

    def scale_gradients(self, factor: float) -> None:
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
