"""Recomputation: backward runs a piece of the forward again, so that nothing it made need be kept in between.

Chen et al. 2016 (arXiv 1604.06174): a layer keeps its input only. From it the forward is run once more when backward
comes to the layer, and for a third more FLOPs the memory of all layers but one is that of their inputs. A dropout mask
is a function of its address (contract 8), so the second run draws the mask of the first; there is no generator whose
state would have to be kept.

What recomputes is outside of the model, which knows nothing of it: it takes the place of a `forward`, and the names of
the parameters stay.

    ===========  =============================================  ===================================================
    kind         computed again                                 kept of a layer
    ===========  =============================================  ===================================================
    `block`      all of it                                      its input, and the addresses of its dropout
    `selective`  the core of attention, from query, key and     all the rest: query, key, value, the core's output,
                 value to what the heads give                   which is the next projection's input
    ===========  =============================================  ===================================================

`selective` is that of Korthikanti et al. 2022 (arXiv 2205.05198, section 5), for whom the core is most of a layer's
memory: it keeps the scores of all pairs of tokens, and few FLOPs give them back. A fused kernel never has them. All
that its core keeps for itself is the log-sum-exp, one number per query and head, so there it saves next to nothing.
It does where the core is more than a kernel: copies of heads that ranks exchange, or a kernel that writes the scores.
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack


def apply_recomputation(model: nn.Module, kind: str) -> None:
    """Let backward compute layers of `model` again: "block", "selective", or "none".

    model: a Transformer, or what pipeline, tensor and context parallelism left of one. Messages inside of what is
    computed again are sent again, in the same order on all ranks.
    """
    for layer in model.model.layers:
        if kind == "block" and hasattr(layer, "self_attn"):  # other stages of a pipeline hold the others
            layer.forward = with_recomputation(layer.forward)
        if kind == "selective" and hasattr(layer, "self_attn"):
            layer.self_attn.attend = with_recomputation(layer.self_attn.attend)


def with_recomputation(run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gives what `run` gives, and of whose graph the arguments alone are kept.

    run: takes and gives tensors, or tuples of them, by position; run again with the same it must do the same. Without
    gradients nothing is kept and nothing is run again.
    """

    def call(*args):
        if not torch.is_grad_enabled():
            return run(*args)
        again = _Again(run, args)
        with saved_tensors_hooks(again.forget, again.find):
            return run(*args)

    return call


class _Enough(Exception):
    """Everything that backward asks for has been computed."""


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
        self._saved.append((tensor.shape, tensor.dtype))
        return len(self._saved) - 1

    def find(self, number: int) -> Tensor:
        if number not in self._found:  # the first that is asked for, or a second backward through the same graph
            self._found = dict(enumerate(self._run_again()))
        return self._found.pop(number)  # and it is free as soon as its operation's backward is done

    def _run_again(self) -> list[Tensor]:
        """The tensors that autograd saved, in their order. Raises RuntimeError when they are of another kind."""
        found: list[Tensor] = []

        def keep(tensor: Tensor) -> None:
            found.append(tensor.detach())
            if len(found) == len(self._saved):  # before the last operation runs, whose result nobody needs
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


def _never(_: None) -> Tensor:
    raise RuntimeError("a recomputed graph is there for its tensors: no backward goes through it")


def _detached(args: Any) -> Any:
    """The same tensors, cut off from what made them, that take gradients where these do; a tuple stays what it is."""
    if isinstance(args, Tensor):
        return args.detach().requires_grad_(args.requires_grad)
    if isinstance(args, tuple):
        parts = [_detached(part) for part in args]
        return type(args)(*parts) if hasattr(args, "_fields") else tuple(parts)
    return args
