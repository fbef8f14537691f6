"""Activation recomputation of a block.

Write the missing lines of _Again and with_recomputation; its docstring specifies the result.
You may call: _detached, _Again, saved_tensors_hooks, torch.is_grad_enabled, torch.enable_grad, suppress, ExitStack,
enumerate.
Check it with: python -m exercises check recomputed_block

Stub b0faf7ec.
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
    """One call: what autograd would save in it is forgotten, and found by a second run when backward asks for it.

    Autograd saves the same tensors in the same order in both runs, so a number stands for each.
    """

    def __init__(self, run: Callable[..., Any], args: tuple):
        self._run, self._args = run, _detached(args)
        self._modes = _get_current_function_mode_stack()  # backward may come when they are over
        self._saved: list[tuple[torch.Size, torch.dtype]] = []
        self._found: dict[int, Tensor] = {}

    def forget(self, tensor: Tensor) -> int:
        raise NotImplementedError("record shape and dtype in `_saved`, and return the index that stands for the tensor")

    def find(self, number: int) -> Tensor:
        raise NotImplementedError("return the tensor of this index, recomputed if necessary, and drop the reference")

    def _run_again(self) -> list[Tensor]:
        """The tensors that autograd saved, in their order. Raises RuntimeError when they are of another kind."""
        found: list[Tensor] = []

        def keep(tensor: Tensor) -> None:
            found.append(tensor.detach())
            if len(found) == len(self._saved):  # before the last operation runs, whose result nobody needs
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
    """A function that gives what `run` gives, and of whose graph the arguments alone are kept.

    run: takes and gives tensors, or tuples of them, by position; run again with the same it must do the same. Without
    gradients nothing is kept and nothing is run again.
    """

    raise NotImplementedError("return a function that runs, and keeps nothing of the graph but the arguments")
