"""One all-reduce per parameter.

Write the missing lines of NaiveSink; the docstring says what is asked.
You may call: all_reduce, torch.tensor, torch.zeros_like.
Check it with: python -m exercises check gradient_sum

Stub 75319ea9.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from minidist.comm import Group, all_reduce
from minidist.parallel.data.reducer import group_of, trainable
from minidist.parameters import Specs


class NaiveSink:
    """One all-reduce per parameter, when backward is over. The version to read first, and to compare with."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], specs: Specs, groups: Iterable[Group]):
        self._parameters = trainable(parameters)
        groups = list(groups)
        self._groups = {name: group_of(specs[name], groups) for name in self._parameters}
        self._sums: dict[str, Tensor] = {}
        self._ready: set[str] = set()

    def add(self, name: str, grad: Tensor) -> None:
        """Add a contribution of this rank to what it has of `name` already."""
        if name in self._ready:
            raise RuntimeError(f"a gradient of {name} came after ready({name!r})")
        if name in self._sums:
            self._sums[name].add_(grad)
        else:
            self._sums[name] = grad.detach().clone(memory_format=torch.contiguous_format)

    def ready(self, name: str) -> None:
        self._ready.add(name)  # nothing is sent before the end

    def finish(self) -> None:
        """Sum over the group: every `.grad` holds its sum, or None when no rank of the group used the parameter."""
        for name, parameter in self._parameters.items():
            group = self._groups[name]
            raise NotImplementedError("sum the gradient over the group; None if no rank used the parameter")
        self._sums, self._ready = {}, set()

    def clear(self) -> None:
        self._sums, self._ready = {}, set()
        for parameter in self._parameters.values():
            parameter.grad = None

    def scale(self, factor: float) -> None:
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
