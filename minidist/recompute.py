"""Activation recomputation (checkpointing): backward repeats part of the forward instead of saving its activations.

Chen et al. 2016 (arXiv 1604.06174): a layer saves only its input, and backward first runs the layer's forward again.
This costs a third more FLOPs, and all layers but one save only their inputs. Dropout masks are a function of their
address, so the second run computes the same masks without any generator state.

Recomputation wraps a `forward` from outside; the model and the names of its parameters do not change.

    ===========  =============================================  ===================================================
    kind         recomputed                                     saved per layer
    ===========  =============================================  ===================================================
    `block`      the whole layer                                its input, and its dropout keys
    `selective`  core attention: from query, key and value to   all else: query, key, value, and the core's output,
                 the heads' output                              which is the next projection's input
    ===========  =============================================  ===================================================

`selective` follows Korthikanti et al. 2022 (arXiv 2205.05198, section 5), where core attention saves the scores of all
pairs of tokens, most of a layer's activations, and recomputing them is cheap. A fused kernel never stores the scores,
only one log-sum-exp per query and head, so with it `selective` saves next to nothing. It helps if core attention saves
more: heads exchanged between ranks, or a kernel that stores the scores.
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack


def apply_recomputation(model: nn.Module, kind: str) -> None:
    """Apply activation recomputation to the layers of `model`: kind "block", "selective", or "none".

    kind: "block" recomputes whole layers, "selective" core attention only, "none" nothing; see the module's table.
    model: a Transformer, possibly already split by pipeline, tensor and context parallelism. Recomputation repeats the
    collectives of a layer, in the same order on all ranks.
    """
    for layer in model.model.layers:
        if kind == "block" and hasattr(layer, "self_attn"):  # not a placeholder of another stage's layer
            layer.forward = with_recomputation(layer.forward)
        if kind == "selective" and hasattr(layer, "self_attn"):
            layer.self_attn.attend = with_recomputation(layer.self_attn.attend)


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


class _AllRecomputed(Exception):
    """Raised inside the recomputation to stop it once all saved tensors have been recomputed."""


class _RecomputationHooks:
    """The saved-tensor hooks of one call of `run`: drop the tensors in forward, and recompute them in backward.

    run: the function. args: its arguments, the only tensors that are kept. Autograd saves the same tensors in the same
    order in the forward and in its recomputation, so an index identifies each of them.
    """

    def __init__(self, run: Callable[..., Any], args: tuple):
        self._run = run
        self._args = _detached(args)
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
                raise _AllRecomputed

        with ExitStack() as stack, torch.enable_grad(), saved_tensors_hooks(keep, _refuse_backward):
            for mode in self._modes:
                stack.enter_context(mode)
            with suppress(_AllRecomputed):
                self._run(*_detached(self._args))
        kinds = [(tensor.shape, tensor.dtype) for tensor in found]
        if kinds != self._saved:
            at = next(i for i in range(len(self._saved)) if kinds[i : i + 1] != self._saved[i : i + 1])
            now = kinds[at] if at < len(kinds) else "missing"
            raise RuntimeError(
                f"recomputation is not what was computed: saved tensor {at} was {self._saved[at]}, now it is {now}"
            )
        return found


def _refuse_backward(_: None) -> Tensor:
    """Unpack hook of the recomputed graph: raise RuntimeError, as only its saved tensors are used."""
    raise RuntimeError("a recomputed graph is there for its tensors: no backward goes through it")


def _detached(args: Any) -> Any:
    """Detach tensors, also in nested tuples, keeping their `requires_grad`."""
    if isinstance(args, Tensor):
        return args.detach().requires_grad_(args.requires_grad)
    if isinstance(args, tuple):
        parts = [_detached(part) for part in args]
        return type(args)(*parts) if hasattr(args, "_fields") else tuple(parts)
    return args
