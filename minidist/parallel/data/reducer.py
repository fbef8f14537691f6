"""The gradient reducer: where gradients are accumulated and summed over the replicas, and what the optimizer updates.

The code that computes a gradient calls `accumulate(name, grad)`, and `mark_ready(name)` once all gradients of that
parameter have been accumulated. Autograd hooks are one such caller (`register_gradient_hooks`); a pipeline that
computes weight gradients by itself is another. Nothing else touches `.grad`: after `finish_reductions()` it holds the
sum over all replicas, or None for a parameter that no rank used, and `clear_gradients()` sets it to None again.

The sum over the replicas is not divided: each loss was already divided by the number of tokens of the global batch
(`minidist.train.loss`), so the sum is the gradient of one process.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from minidist.comm import Group
from minidist.parameters import ParamSpec, ParamSpecs


def trainable_parameters(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, in the same order."""
    return {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}


class GradientReducer(ABC):
    """Accumulates and reduces the gradients of one step, and holds the tensors that the optimizer updates.

    `Engine.step` calls it in this order: `accumulate` and `mark_ready` during backward, `finish_micro_batch` after each
    micro-batch, `finish_reductions`, `scale_gradients`; then, for each of `groups_to_update`, `attach_grads`, the
    optimizer's step and `copy_to_params`; finally `gather_params` and `clear_gradients`. The methods that are not
    abstract default to plain data parallelism: every replica updates all of its parameters in place.

    parameters: this rank's parameters, by global name. specs: their specs. masters: the tensors that the optimizer
    updates, by global name; here the parameters themselves, in mixed precision their float32 copies. master_specs:
    which elements of a parameter each master holds. reduces_each_micro_batch: whether gradients are reduced after every
    micro-batch (ZeRO stages 2 and 3); otherwise once per step. gatherer: gathers the parameters block by block while
    the model runs (ZeRO stage 3); None elsewhere.
    """

    reduces_each_micro_batch = False
    gatherer: Any = None

    def __init__(self, parameters: Mapping[str, nn.Parameter], specs: ParamSpecs):
        self._parameters = trainable_parameters(parameters)
        self.masters: dict[str, Tensor] = self._parameters
        self.master_specs = {name: specs[name] for name in self._parameters}

    @abstractmethod
    def accumulate(self, name: str, grad: Tensor) -> None:
        """Accumulate a local gradient of parameter `name`, of the parameter's shape.

        The reducer may keep `grad` and add to it: the caller must not use it again. Raises RuntimeError after
        `mark_ready(name)`, when the gradient may already be in flight.
        """

    @abstractmethod
    def mark_ready(self, name: str) -> None:
        """Declare that all gradients of parameter `name` have been accumulated, so that its reduction may start."""

    def finish_micro_batch(self, chunk: int | None = None) -> None:
        """Called when the backward of a micro-batch is over. A no-op here; a collective in ZeRO-2 and ZeRO-3.

        chunk: the index, among this rank's model chunks, of the one whose backward is over; None: of all its chunks.
        """

    @abstractmethod
    def finish_reductions(self) -> None:
        """Collective: launch the step's remaining reductions and wait until all have completed."""

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the reduced gradients of the `masters`, by parameter name; None where no rank used the parameter."""
        return {name: parameter.grad for name, parameter in self._parameters.items()}

    @property
    def used_flags(self) -> list[float]:
        """Whether this rank used each parameter in the step, as 1.0 or 0.0; empty if reductions count the uses.

        The engine sums the flags over all ranks and passes the sums to `exclude_unused`.
        """
        return []

    def exclude_unused(self, use_counts: Sequence[float]) -> None:
        """Exclude the parameters that no rank used from the update, in ZeRO; a no-op here.

        use_counts: the sum of all ranks' `used_flags`.
        """

    def scale_gradients(self, factor: float) -> None:
        """Multiply every reduced gradient by `factor`."""
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def groups_to_update(self) -> list[Any]:
        """Return the update groups: the masters that one call of the optimizer's `step` updates; here a single group.

        The groups are opaque to the caller, which passes each to `attach_grads`, `names_to_update`, `copy_to_params`.
        """
        return [None]

    def names_to_update(self, update_group: Any) -> list[str]:
        """Return the names of the parameters in an update group that any rank has used; the optimizer updates these."""
        return [name for name, parameter in self._parameters.items() if parameter.grad is not None]

    def attach_grads(self, update_group: Any) -> None:
        """Set `.grad` of every master of an update group to its reduced gradient; here `.grad` is set already."""

    def copy_to_params(self, update_group: Any, step: int) -> None:
        """Copy an update group's masters to the parameters; a no-op here: they are the same tensors. step: from 0."""

    def gather_params(self) -> None:
        """Collective: all-gather the updated parameters, in ZeRO; do nothing here, where each rank updates all."""

    def clear_gradients(self) -> None:
        """Drop the gradients of this step: set every `.grad` to None."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return this rank's elements of each parameter by name, for a checkpoint to save or a load to overwrite."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def after_load(self) -> None:
        """Collective: update the parameters of all ranks after a load or merge has overwritten `checkpoint_tensors`."""
        self.gather_params()


def find_gradient_group(spec: ParamSpec, groups: Iterable[Group]) -> Group:
    """Return the group that sums a parameter's gradient.

    Its ranks are exactly the *contributors*, the replicas whose local gradients must be summed. Raises KeyError when no
    group of exactly these ranks was created.
    """
    for group in groups:
        if group.ranks == spec.contributors:
            return group
    raise KeyError(f"no group was bound over ranks {spec.contributors}, which contribute to parameter {spec.name}")


def register_gradient_hooks(
    parameters: Mapping[str, nn.Parameter], reducer: GradientReducer, is_last_backward: Callable[[], bool]
) -> list[RemovableHandle]:
    """Register autograd hooks that pass each gradient to the reducer as soon as backward has computed it.

    is_last_backward: returns whether the running backward is the last one of the step. Only then does a hook call
    `mark_ready`; in earlier micro-batches gradients accumulate and nothing is sent. The hooks set `.grad` to None,
    because autograd would add the next gradient to one that the reducer already has. Autograd does not call the hook of
    a parameter that a backward did not use. Returns the hooks' handles, whose `remove()` unregisters them.
    """

    def hook_for(name: str):
        def hook(parameter: Tensor) -> None:
            reducer.accumulate(name, parameter.grad)
            parameter.grad = None
            if is_last_backward():
                reducer.mark_ready(name)

        return hook

    return [
        parameter.register_post_accumulate_grad_hook(hook_for(name))
        for name, parameter in trainable_parameters(parameters).items()
    ]
