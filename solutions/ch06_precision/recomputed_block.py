"""Activation recomputation of a block: the solution, as it stands in minidist.recompute.

The tensors that autograd saves for a layer are many times as large as its input, and all of them can be recomputed
from the input. So only the input is kept, and the price is one more forward, a third more arithmetic per step. Each
call keeps its own arguments: with several micro-batches in flight, each must be recomputed from its own input.

The second run must be identical to the first: same input, same dropout mask, same function modes. A dropout mask here
is a function of its address, which is among the arguments. A generator whose state advances would draw another mask
in the second run, and the gradients would belong to a network that no forward has computed; the loss would fall all
the same. If a layer communicates, the recomputation communicates again, so all ranks must recompute in the same
order, and once per call, not once per saved tensor.

Usual wrong answers:
* run again for every tensor that backward asks for
* what a block saved is copied in forward, so that backward finds it
* the second run has another dropout mask than the first
* every backward computes from the arguments of the last call
* the package's own
* ones, whatever is given
* only the first argument comes to the second run as it was
* a block whose input takes no gradient is run without a graph
* the second run makes no graph, as in backward gradients are off, and so nothing is saved
* a second backward finds nothing any more
* a number is packed, and the tensor is kept beside it
* right numbers, and everything is kept that was kept before
* what was found is kept until backward is over
* numbers count from the last tensor saved, not from the first
* run again for every tensor, and every message sent as often
* function modes that were on in the first run are off in the second
* all calls share one list of what was saved
* torch's own checkpoint, prepared so that no line of the answer calls it
* torch's own checkpoint
* run again in forward already, to be ready for backward
* run twice under no_grad as well, to count what would be saved
* zeros, with a graph of nothing
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack

from minidist.recompute import _detached, _Enough, _never


class _Again:
    """The saved-tensor hooks of one call: drop tensors in forward, and recompute them in backward.

    Autograd saves the same tensors in the same order in both runs, so each is identified by its index.
    """

    def __init__(self, run: Callable[..., Any], args: tuple):
        self._run, self._args = run, _detached(args)
        self._modes = _get_current_function_mode_stack()  # backward may run after they have ended
        self._saved: list[tuple[torch.Size, torch.dtype]] = []
        self._found: dict[int, Tensor] = {}

    def forget(self, tensor: Tensor) -> int:
        """Drop a tensor that autograd saves; return its index."""
        self._saved.append((tensor.shape, tensor.dtype))
        return len(self._saved) - 1

    def find(self, number: int) -> Tensor:
        """Return the saved tensor with this index; the first call recomputes all of them."""
        if number not in self._found:  # the first call, or a second backward through the same graph
            self._found = dict(enumerate(self._run_again()))
        return self._found.pop(number)  # freed as soon as its operation's backward is done

    def _run_again(self) -> list[Tensor]:
        """Recompute the saved tensors, in order. Raises RuntimeError if their shapes or dtypes differ."""
        found: list[Tensor] = []

        def keep(tensor: Tensor) -> None:
            found.append(tensor.detach())
            if len(found) == len(self._saved):  # skips the rest of the forward, which is not needed
                raise _Enough

        with ExitStack() as stack, torch.enable_grad(), saved_tensors_hooks(keep, _never):
            for mode in self._modes:
                stack.enter_context(mode)
            with suppress(_Enough):
                self._run(*_detached(self._args))
        kinds = [(tensor.shape, tensor.dtype) for tensor in found]
        if kinds != self._saved:
            at = next(i for i in range(len(self._saved)) if kinds[i : i + 1] != self._saved[i : i + 1])
            now = kinds[at] if at < len(kinds) else "missing"
            raise RuntimeError(
                f"recomputation is not what was computed: saved tensor {at} was {self._saved[at]}, now it is {now}"
            )
        return found


def with_recomputation(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `run` so that autograd saves only its arguments, and backward runs it again for the other saved tensors.

    run: takes and returns tensors, or tuples of them, as positional arguments; must be deterministic. Under `no_grad`
    it is called as it is.
    """

    def call(*args):
        if not torch.is_grad_enabled():
            return run(*args)
        again = _Again(run, args)
        with saved_tensors_hooks(again.forget, again.find):
            return run(*args)

    return call
