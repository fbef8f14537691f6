"""Gradient accumulation without communication.

Write the missing lines of register_gradient_hooks; its docstring specifies the result.
You may call: reducer.accumulate, reducer.mark_ready, is_last_backward.
Check it with: python -m exercises check accumulation

Stub 16a344c4.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from minidist.parallel.data.reducer import GradientReducer, trainable_parameters


def register_gradient_hooks(
    parameters: Mapping[str, nn.Parameter], reducer: GradientReducer, is_last_backward: Callable[[], bool]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Register autograd hooks that pass each gradient to the reducer as soon as backward has computed it.

    is_last_backward: returns whether the running backward is the last one of the step. Only then does a hook call
    `mark_ready`; in earlier micro-batches gradients accumulate and nothing is sent. The hooks set `.grad` to None,
    because autograd would add the next gradient to one that the reducer already has. Autograd does not call the hook of
    a parameter that a backward did not use. Returns the hooks' handles, whose `remove()` unregisters them.
    """

    def hook_for(name: str):
        def hook(parameter: Tensor) -> None:
            raise NotImplementedError("pass the gradient to the reducer; in the last micro-batch declare it ready")

        return hook

    return [
        parameter.register_post_accumulate_grad_hook(hook_for(name))
        for name, parameter in trainable_parameters(parameters).items()
    ]
