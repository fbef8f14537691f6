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
* recomputes for every tensor that backward needs
* copies the saved tensors in forward, so that backward finds them
* the second run draws another dropout mask
* every backward recomputes from the arguments of the last call
* the package's own
* ones, whatever the input
* the second run gets only the first argument unchanged
* runs a block without a graph if its input requires no gradient
* the second run builds no graph, because gradients are disabled in backward, so nothing is saved
* a second backward finds no saved tensors
* packs an index, but also keeps the tensor
* right values, but saves as much as without recomputation
* keeps the recomputed tensors until backward ends
* counts indices from the last saved tensor
* recomputes for every tensor, and sends every message as often
* the second run lacks the function modes of the first
* all calls share one list of saved tensors
* torch's own checkpoint, wrapped so that no line of the answer calls it
* torch's own checkpoint
* recomputes already in forward
* runs twice under no_grad as well
* zeros, with an empty graph
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack

from minidist.recompute import _detached, _Enough, _never


class _RecomputationHooks:
    """The saved-tensor hooks of one call of `run`: drop the tensors in forward, and recompute them in backward.

    run: the function. args: its arguments, the only tensors that are kept. Autograd saves the same tensors in the same
    order in both runs, so an index identifies each of them.
    """

    def __init__(self, run: Callable[..., Any], args: tuple):
        self._run, self._args = run, _detached(args)
        self._modes = _get_current_function_mode_stack()  # backward may run after they have ended
        self._saved: list[tuple[torch.Size, torch.dtype]] = []
        self._found: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> int:
        """Drop a tensor that autograd saves; return its index."""
        self._saved.append((tensor.shape, tensor.dtype))
        return len(self._saved) - 1

    def unpack(self, index: int) -> Tensor:
        """Return the saved tensor with this index; the first call recomputes all of them."""
        if index not in self._found:  # the first call, or a second backward through the same graph
            self._found = dict(enumerate(self._run_again()))
        return self._found.pop(index)  # freed as soon as its operation's backward is done

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
    """Wrap a function so that autograd saves only its arguments, and backward recomputes all other saved tensors.

    run: the function. It takes positional arguments, returns tensors or tuples of tensors, and is deterministic.
    Returns a function with the same arguments and results. Under `no_grad` it only calls `run`.
    """

    def call(*args):
        if not torch.is_grad_enabled():
            return run(*args)
        hooks = _RecomputationHooks(run, args)
        with saved_tensors_hooks(hooks.pack, hooks.unpack):
            return run(*args)

    return call
