"""Activation recomputation of a block.

Write the missing lines of _RecomputationHooks and with_recomputation; their docstrings specify the results.
You may call: _detached, _RecomputationHooks, saved_tensors_hooks, torch.is_grad_enabled, torch.enable_grad, suppress,
ExitStack, enumerate.
Check it with: python -m exercises check recomputed_block

Stub eb4aeda3.
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
        raise NotImplementedError("record shape and dtype in `_saved`, and return the index that stands for the tensor")

    def unpack(self, index: int) -> Tensor:
        """Return the saved tensor with this index; the first call recomputes all of them."""
        raise NotImplementedError("return the tensor of this index, recomputed if necessary, and drop the reference")

    def _run_again(self) -> list[Tensor]:
        """Recompute the saved tensors, in order. Raises RuntimeError if their shapes or dtypes differ."""
        found: list[Tensor] = []

        def keep(tensor: Tensor) -> None:
            found.append(tensor.detach())
            if len(found) == len(self._saved):  # skips the rest of the forward, which is not needed
                raise _Enough

        raise NotImplementedError("repeat the first run until `keep` stops it")
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

    raise NotImplementedError("return a function that runs, and keeps nothing of the graph but the arguments")
