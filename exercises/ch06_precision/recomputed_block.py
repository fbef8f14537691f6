"""Activation recomputation of a block.

Autograd saves many tensors of a block for backward, and all of them can be recomputed from the block's arguments.
Write a function that wraps a block so that only its arguments are kept, with saved_tensors_hooks, which section 6.6 of
the notebook introduces.

run: any function of tensors and other objects, by position. Result: a function that is called in its place, any number
of times before the first backward.
Example: with block = lambda x: x.exp().sin() and x of shape (1024,), autograd saves x.exp() twice over: 8 kB in fp32.
    y = with_recomputation(block)(x)   has the same values, and nothing of these 8 kB exists after the call
    y.sum().backward()                 calls block(x) once more, and gives x.grad bit for bit as without the wrapper

Checked: outputs and gradients bit for bit, in float64 and bf16, with dropout; memory between forward and backward, and
that each recomputed tensor is freed when its operation is done; several calls in flight, with backward in any order;
how often the block runs (once in forward, once per backward, once under no_grad); torch's random numbers in the block,
and after it; and on 1 to 4 ranks that a block's messages are repeated once, in the same order on all of them.

You may call:
    saved_tensors_hooks(pack, unpack)   within it, autograd stores pack(tensor), and backward calls unpack(stored)
    torch.is_grad_enabled(), torch.enable_grad()   gradients are disabled while backward runs
    torch.get_rng_state(), torch.set_rng_state(state)   the state of the CPU's random numbers
    fork_rng(devices=[])   a context manager: restores that state when it ends
    Tensor.detach(), Tensor.requires_grad_(flag), isinstance(x, Tensor), count()   count(): 0, 1, 2, ... by next()

Check it with: python -m exercises check recomputed_block

Stub 69b2cc74.
"""

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.random import fork_rng


def with_recomputation(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that autograd saves only its arguments, and backward recomputes all other saved tensors.

    run: takes tensors and other arguments by position, and returns tensors. Returns a function with the same arguments
    and results. Backward calls `run` once more, from the CPU random state that forward began with, and leaves the
    current random state unchanged. Under `no_grad` the function only calls `run`.
    """

    raise NotImplementedError("return a function that runs, and keeps nothing of the graph but the arguments")
