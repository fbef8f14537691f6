"""Gradient accumulation without communication: the solution, as it stands in minidist.parallel.data.reducer.

The sum over micro-batches is local: only the complete sum goes over the network, once per step instead of once per
micro-batch. The reducer owns it. Setting .grad to None in every backward keeps autograd from adding to the same
tensor, which would count the first micro-batch several times, and it avoids a second copy of the gradient.

The alternative, letting autograd accumulate and passing .grad to the reducer in the last micro-batch only, fails if
the last micro-batch does not use a parameter that an earlier one used: its hook does not run.

Usual wrong answers:
* the mean over micro-batches, though every loss was divided already
* calls the package's own
* ones, whatever the gradient is
* .grad is kept, so autograd adds each gradient to those before it
* .grad is emptied in the last micro-batch only
* wrong on four ranks only, where gradients are doubled
* every hook uses the name of the last parameter
* autograd adds up, and what the last micro-batch does not use is lost
* nothing is ever ready, so nothing is sent before the end of the step
* the hooks cannot be removed
* only the gradient of the last micro-batch is passed on
* every micro-batch sends what it has
* a gradient is said to be ready before it is added
* gradients are rounded to bfloat16 before they reach the reducer
* zeros
* .grad is filled with zeros instead, and the memory is held twice
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from minidist.parallel.data.reducer import GradientReducer, trainable


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
