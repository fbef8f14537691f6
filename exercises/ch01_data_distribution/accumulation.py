"""Micro-batches without communication.

Write the missing lines of collect; the docstring says what is asked.
You may call: sink.add, sink.ready, last.
Check it with: python -m exercises check accumulation

Stub a1db3bdb.
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
            raise NotImplementedError("hand the gradient to the sink; in the last micro-batch it is ready to be sent")

        return hook

    return [
        parameter.register_post_accumulate_grad_hook(hook_for(name))
        for name, parameter in trainable(parameters).items()
    ]
