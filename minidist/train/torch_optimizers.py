"""torch's AdamW and SGD without torch's compiler, whose import takes longer than that of all the rest of torch.

torch's optimizers exclude some methods from `torch.compile` with `torch._disable_dynamo`, and stop compilation around
`step`. Both import `torch._dynamo`, also in a program that compiles nothing. The trainer never compiles its optimizer.
"""

import torch
from torch.optim import Optimizer


class _WithoutCompiler(Optimizer):
    """Calls the methods of torch's optimizers without the decorators that import `torch._dynamo`."""

    def add_param_group(self, param_group: dict) -> None:
        """Add a parameter group, as in torch."""
        _undecorated(Optimizer.add_param_group)(self, param_group)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the parameters that have a gradient. closure: not used."""
        _undecorated(super().step.__func__)(self)


class AdamW(_WithoutCompiler, torch.optim.AdamW):
    """`torch.optim.AdamW` without `torch._dynamo`."""


class SGD(_WithoutCompiler, torch.optim.SGD):
    """`torch.optim.SGD` without `torch._dynamo`."""


def _undecorated(method):
    """Return the innermost function that decorators have wrapped."""
    while hasattr(method, "__wrapped__"):
        method = method.__wrapped__
    return method
