"""Gradient accumulation without communication.

A step has several micro-batches, and their gradients are summed before they are sent. Write the function that connects
autograd with a reducer, so that every micro-batch adds its gradients and only the last one lets the reducer send them.

parameters: {name: nn.Parameter}, some of which may not require a gradient. reducer: any reducer of this chapter.
is_last_backward(): a function that returns whether the running backward is the last one of its step. Result: a list of
handles, one per hook; after handle.remove() of each, backward calls the reducer no more.
Example: a step of 2 micro-batches, in which the gradients of w are [3.] and [4.], and only the first one uses r: [5.]
    first backward    reducer.accumulate("r", [5.]), reducer.accumulate("w", [3.])
    second backward   reducer.accumulate("w", [4.]), then reducer.mark_ready("w")
After each backward, `.grad` is None for both. The reducer sends w = [7.] and, in finish_reductions(), r = [5.].

Checked: the reducer's calls in each micro-batch; the sums against one backward over all micro-batches, bit for bit, on
1 to 4 ranks with different data; nothing sent before the last micro-batch; parameters that some micro-batches, or
none, use; `.grad` after each backward; steps of 2, 1 and 3 micro-batches with a real reducer, which send equally many
bytes and carry nothing over; and hooks on two models at once.

You may call:
    parameter.register_post_accumulate_grad_hook(hook)   backward calls hook(parameter) when it has written .grad
    trainable_parameters(parameters)   the parameters that require a gradient, by name
    reducer.accumulate(name, grad)   adds a gradient; the reducer may keep the tensor `grad` and change it
    reducer.mark_ready(name)   no more gradients of this parameter in this step: it may be sent

Check it with: python -m exercises check accumulation

Stub 9d42f943.
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

    raise NotImplementedError("register a hook on each parameter; return the handles")
