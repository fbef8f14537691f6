"""The gradient reducer: where gradients are accumulated and summed over the replicas, and what the optimizer updates.

The code that computes a gradient calls `add(name, grad)`, and `ready(name)` once all gradients of that parameter have
been accumulated. Autograd hooks are one such caller (`collect`); a pipeline that computes weight gradients by itself is
another. Nothing else touches `.grad`: after `finish()` it holds the sum over all replicas, or None for a parameter that
no rank used, and `clear()` sets it to None again.

The sum over the replicas is not divided: each loss was already divided by the number of tokens of the global batch
(`minidist.train.loss`), so the sum is the gradient of one process.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm import Group, all_reduce
from minidist.parameters import ParamSpec, ParamSpecs


def trainable(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, in the same order."""
    return {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}


class GradientReducer:
    """Accumulates and reduces the gradients of one step, and holds the tensors that the optimizer updates.

    `Engine.step` calls it in this order: `add` and `ready` during backward, `end_backward` after each micro-batch,
    `finish`, `scale`, then for each of `update_groups` the optimizer between `attach_grads` and `copy_to_params`,
    `gather`, `clear`. A subclass implements `add`, `ready`, `finish`, `clear` and `scale`. All else defaults to plain
    data parallelism: every replica updates all of its parameters in place.

    masters: by global name, the tensors that the optimizer updates. master_specs: which elements of a parameter each
    master holds. reduces_each_micro_batch: whether gradients are reduced, and so become ready, in every
    micro-batch.
    gatherer: gathers the parameters block by block while the model runs (ZeRO stage 3); None elsewhere.
    """

    reduces_each_micro_batch = False
    gatherer: Any = None

    def __init__(self, parameters: Mapping[str, nn.Parameter], specs: ParamSpecs):
        self._parameters = trainable(parameters)
        self.masters: dict[str, Tensor] = self._parameters
        self.master_specs = {name: specs[name] for name in self._parameters}

    def add(self, name: str, grad: Tensor) -> None:
        """Accumulate a local gradient of parameter `name`, of the parameter's shape.

        The reducer may keep `grad` and add to it: the caller must not use it again. Raises RuntimeError after
        `ready(name)`, when the gradient may already be in flight.
        """
        raise NotImplementedError

    def ready(self, name: str) -> None:
        """Declare that all gradients of `name` have been accumulated, so that its reduction may start."""
        raise NotImplementedError

    def end_backward(self, chunk: int | None = None) -> None:
        """End the backward of a micro-batch through the whole model, or through one chunk of a pipeline's stage."""

    def finish(self) -> None:
        """End the step's backward: return once every reduction has completed."""
        raise NotImplementedError

    def gradients(self) -> dict[str, Tensor | None]:
        """The reduced gradient of each master; None for a parameter that no rank used."""
        return {name: parameter.grad for name, parameter in self._parameters.items()}

    @property
    def used_flags(self) -> list[float]:
        """1.0 or 0.0 per parameter, to be summed over all ranks for `mark_unused`; empty if the reducer needs none."""
        return []

    def mark_unused(self, use_counts: Sequence[float]) -> None:
        """Take the sums of all ranks' `used_flags`: a parameter with a count of 0 gets no gradient."""

    def scale(self, factor: float) -> None:
        """Multiply every reduced gradient by `factor`."""
        raise NotImplementedError

    def update_groups(self) -> list[Any]:
        """The groups of masters that the optimizer updates in one call each; by default one group with all of them."""
        return [None]

    def updated_names(self, group: Any) -> list[str]:
        """The parameters of an update group that some rank used. This rank may hold no element of them."""
        return [name for name, parameter in self._parameters.items() if parameter.grad is not None]

    def attach_grads(self, group: Any) -> None:
        """Give the masters of an update group their `.grad`."""

    def copy_to_params(self, group: Any, step: int) -> None:
        """Copy updated masters to the parameters and detach their gradients. step: the number of this step."""

    def gather(self) -> None:
        """Bring the updated parameters to all ranks."""

    def clear(self) -> None:
        """Forget the step: every `.grad` is None."""
        raise NotImplementedError

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """This rank's elements of each parameter, as `master_specs` says: a checkpoint reads and writes them."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def after_load(self) -> None:
        """Copy the loaded `checkpoint_tensors` to the parameters of all ranks."""


def group_of(spec: ParamSpec, groups: Iterable[Group]) -> Group:
    """The group that sums a parameter's gradient: its ranks are exactly the contributors.

    Raises KeyError when no such group was bound.
    """
    for group in groups:
        if group.ranks == spec.contributors:
            return group
    raise KeyError(f"no group was bound over ranks {spec.contributors}, which contribute to parameter {spec.name}")


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


def collect(
    parameters: Mapping[str, nn.Parameter], reducer: GradientReducer, last: Callable[[], bool]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Register autograd hooks that hand each gradient to the reducer as soon as a backward has computed it.

    last: returns whether the running backward is the last one of the step. Only in that one is a gradient declared
    ready; in the micro-batches before, gradients accumulate and nothing is sent. The hooks set `.grad` to None, because
    autograd would add the next backward's gradient to one that the reducer already has. Autograd does not call the hook
    of a parameter that a backward did not use. Returns the hooks' handles, whose `remove()` unregisters them.
    """

    def hook_for(name: str):
        def hook(parameter: Tensor) -> None:
            reducer.add(name, parameter.grad)
            parameter.grad = None
            if last():
                reducer.ready(name)

        return hook

    return [
        parameter.register_post_accumulate_grad_hook(hook_for(name))
        for name, parameter in trainable(parameters).items()
    ]
