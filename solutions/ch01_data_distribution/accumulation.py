"""Gradient accumulation without communication: the solution, as it stands in minidist.parallel.data.reducer.

The sum over micro-batches is local: only the complete sum goes over the network, once per step instead of once per
micro-batch. The reducer owns it. Setting .grad to None in every backward keeps autograd from adding to the same
tensor, which would count the first micro-batch several times, and it avoids a second copy of the gradient.

The alternative, letting autograd accumulate and passing .grad to the reducer in the last micro-batch only, fails if
the last micro-batch does not use a parameter that an earlier one used: its hook does not run.

Usual wrong answers:
* averages over the micro-batches, although every loss is already divided
* calls the package's function
* adds ones instead of the gradient
* keeps .grad, so autograd adds each gradient to the earlier ones
* sets .grad to None in the last micro-batch only
* never forgets which gradients were ready, so that later steps send none
* doubles the gradients, on four ranks only
* every hook uses the name of the last parameter
* every hook uses the last name of the loop
* lets autograd accumulate, and loses a parameter that the last micro-batch does not use
* never calls ready, so nothing is sent before the end of the step
* returns no handles, so the hooks cannot be removed
* adds only the gradient of the last micro-batch
* calls ready in every micro-batch
* calls ready before it adds the gradient
* rounds gradients to bfloat16 before it adds them
* keeps the sum of the micro-batches itself, and never empties it: later steps contain the earlier ones
* adds zeros
* skips gradients that are all zeros
* fills .grad with zeros instead of freeing it, so the memory is allocated twice
"""

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from minidist.parallel.data.reducer import GradientReducer, trainable_parameters


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
