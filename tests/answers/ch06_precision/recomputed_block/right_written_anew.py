"""One closure per call; the second run goes to its end, though nobody needs what comes last."""

import contextlib

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack


def detached(value):
    """Tensors that begin a graph of their own, in tuples of whatever kind."""
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    if not isinstance(value, tuple):
        return value
    parts = [detached(part) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


class _Again:
    """A number of a call, whose tensor `found` has when it has been run again."""

    def __init__(self, number):
        self.number = number


def recomputed(run):
    """A function that gives what `run` gives, and of whose graph the arguments alone are kept."""

    def call(*args):
        mine, modes, found, count = detached(args), _get_current_function_mode_stack(), {}, [0]

        def pack(_):
            count[0] += 1
            return _Again(count[0])

        def unpack(again):
            if again.number not in found:
                fresh = []
                with contextlib.ExitStack() as stack:
                    for mode in modes:
                        stack.enter_context(mode)
                    stack.enter_context(torch.enable_grad())
                    stack.enter_context(
                        saved_tensors_hooks(lambda tensor: fresh.append(tensor.detach()), lambda _: None)
                    )
                    run(*mine)
                found.update(enumerate(fresh, 1))
            return found.pop(again.number)

        with saved_tensors_hooks(pack, unpack) if torch.is_grad_enabled() else contextlib.nullcontext():
            return run(*args)

    return call
