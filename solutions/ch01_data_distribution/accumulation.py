"""Micro-batches without communication: the solution, as it stands in minidist.parallel.data.reducer.

Sums over micro-batches are local: only the whole sum goes over the network, once per step instead of once per micro-
batch. The sink owns it. Emptying .grad in every backward keeps autograd from adding to it as well, which would count
the first micro-batch again and again, and it keeps a gradient from being held twice.

Handing over only in the last micro-batch, what autograd has added up by itself, fails where the last micro-batch does
not use a parameter that an earlier one used: its hook does not run.

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
* only the gradient of the last micro-batch is handed over
* every micro-batch sends what it has
* a gradient is said to be ready before it is handed over
* gradients are rounded to bfloat16 on their way to the sink
* zeros
* .grad is filled with zeros instead, and the memory is held twice
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from minidist.parallel.data.reducer import GradSink, trainable


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
