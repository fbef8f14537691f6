"""The gradient sink: the one place where gradients are accumulated, and through which they are reduced.

Whoever computes a gradient hands it over with `add(name, grad)` and says `ready(name)` when no more will come in this
step. Autograd hooks are one such caller (`collect`); a pipeline that computes weight gradients by itself is another.
Nothing else touches `.grad`: after `finish()` it holds the sum over all replicas, or None for a parameter that no rank
used, and `clear()` empties it again.

The sum is over replicas and is not divided: each loss was already divided by the number of tokens of the whole global
batch (contract of the loss), so the sum is the gradient of one process.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from minidist.comm import Group, all_reduce
from minidist.parameters import ParamSpec, Specs


class GradSink(Protocol):
    """Accumulates the gradients of one step and reduces them over the replicas."""

    def add(self, name: str, grad: Tensor) -> None:
        """One contribution of this rank to the gradient of parameter `name`, of the parameter's shape.

        The sink may keep `grad` and add to it: it is no longer the caller's.

        Raises RuntimeError after `ready(name)`: the gradient may be on its way already.
        """

    def ready(self, name: str) -> None:
        """No more contributions to `name` will come in this step."""

    def finish(self) -> None:
        """End of the step's backward: return when every `.grad` holds its reduced gradient."""

    def clear(self) -> None:
        """Forget the step: every `.grad` is None."""

    def scale(self, factor: float) -> None:
        """Multiply every reduced gradient by `factor`."""


def trainable(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Those that take a gradient. Frozen parameters are nobody's business here."""
    return {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}


def group_of(spec: ParamSpec, groups: Iterable[Group]) -> Group:
    """The group that sums a parameter's gradient: its ranks are exactly the contributors.

    Raises KeyError when no such group was bound.
    """
    for group in groups:
        if group.ranks == spec.contributors:
            return group
    raise KeyError(f"no group was bound over ranks {spec.contributors}, which contribute to parameter {spec.name}")


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
            # Ranks must agree on what is sent: a rank that did not use the parameter sends zeros all the same.
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


def collect(
    parameters: Mapping[str, nn.Parameter], sink: GradSink, last: Callable[[], bool]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Let autograd feed the sink: every gradient goes there the moment it is complete for this backward.

    last: whether the backward that is running is the last of the step, so that each gradient is then ready. Before it,
    contributions only accumulate: nothing is sent in an inner micro-batch. `.grad` is left None, since autograd would
    add the next backward's gradient to one that the sink has already. A parameter that a backward does not use has no
    hook called in it. Returns the hooks, whose `remove()` ends this.
    """

    def hook_for(name: str):
        def hook(parameter: Tensor) -> None:
            sink.add(name, parameter.grad)
            parameter.grad = None
            if last():
                sink.ready(name)

        return hook

    return [
        parameter.register_post_accumulate_grad_hook(hook_for(name))
        for name, parameter in trainable(parameters).items()
    ]
