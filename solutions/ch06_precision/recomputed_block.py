"""Activation recomputation of a block: the solution, as it stands in minidist.precision.simple.

The tensors that autograd saves for a layer are many times as large as its input, and all of them can be recomputed
from the input. So only the input is kept, and the price is one more forward, a third more arithmetic per step. Each
call keeps its own arguments: with several micro-batches in flight, each must be recomputed from its own input.

The second run must be identical to the first: same input, same dropout mask. Here the random state of forward is set
again, and the current one restored afterwards; otherwise the gradients would belong to a network that no forward has
computed, and the loss would fall all the same. If a layer communicates, the recomputation communicates again, so all
ranks must recompute in the same order, and once per call, not once per saved tensor.

Usual wrong answers:
* recomputes for every tensor that backward needs
* every backward recomputes from the arguments of the last call
* the detached arguments require no gradient, so the second run saves other tensors
* the package's own
* ones, whatever the input
* copies the saved tensors in forward, so that backward finds them
* runs a block without a graph if its first argument requires no gradient
* the second run builds no graph, because gradients are disabled in backward, so nothing is saved
* keeps the recomputed tensors with their graph, which keeps them in turn
* packs a number, but also keeps the tensor
* right values, but saves as much as without recomputation
* keeps the recomputed tensors until the graph is gone
* numbers the recomputed tensors from the last one
* recomputes for every tensor, and sends every message as often
* all calls share one counter and one dictionary
* torch's own checkpoint, wrapped so that no line of the answer calls it
* leaves torch's random state as the second run left it
* the second run draws other random numbers
* keeps the random state of the moment at which the block was wrapped
* torch's own checkpoint
* recomputes only if no recomputed tensor is left
* recomputes already in forward
* recomputes once, and has nothing left for a second backward
* gives both runs the same seed, which changes the numbers of forward
* runs twice under no_grad as well
* zeros, with an empty graph
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

    def call(*args):
        if not torch.is_grad_enabled():
            return run(*args)
        state, indices, saved = torch.get_rng_state(), count(), {}  # saved: recomputed tensors by index

        def unpack(index: int) -> Tensor:
            if index not in saved:  # the first tensor that backward needs, or a second backward
                found: list[Tensor] = []
                inputs = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in args]
                with fork_rng(devices=[]), torch.enable_grad():
                    torch.set_rng_state(state)
                    with saved_tensors_hooks(lambda x: found.append(x.detach()), found.pop):
                        run(*inputs)
                saved.update(enumerate(found))
            return saved.pop(index)  # freed once the operation that needs it has done its backward

        with saved_tensors_hooks(lambda _: next(indices), unpack):
            return run(*args)

    return call
