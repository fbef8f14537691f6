"""Loss normalisation: the gradient equals that of one process with the global batch, however the batch is split.

The loss of a step is the weighted sum of the token losses divided by the weighted number of tokens, both without
ignored labels. That number, the count, is all-reduced once, before the first backward. The loss sum of every
micro-batch is divided by the count before its backward, so gradients are only summed, over micro-batches and ranks. A
mean of per-rank or per-micro-batch means is a different loss under uneven padding: it gives the tokens of a short part
more weight.
"""

from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor

from minidist.comm import Group, all_reduce


class AsyncSum:
    """A sum over the ranks of a group; the constructor launches the all-reduce. mine: this rank's summand, (1,)."""

    def __init__(self, mine: Tensor, group: Group):
        self._total = mine
        self._handle = all_reduce(self._total, group, async_op=True)

    @cached_property
    def value(self) -> float:
        """The sum as a number; the first access waits for the all-reduce."""
        self._handle.wait(host=True)
        return self._total.item()


def all_reduce_token_count(counts: Iterable[int], weight: float, group: Group) -> AsyncSum:
    """Collective: all-reduce the weighted number of tokens of the global batch: sum_i w_i n_i over the ranks i.

    counts: the number of tokens with a loss in each of this rank's micro-batches; n_i is their sum. weight: w_i, the
    weight of this rank's data. The returned `AsyncSum` waits for the result when its `value` is read.
    """
    mine = torch.tensor([sum(counts) * weight], dtype=torch.float64, device=group.world.control_device)
    return AsyncSum(mine, group)


def backward(loss_sums: Iterable[Tensor], weight: float, count: AsyncSum) -> float | Tensor:
    """Run backward of this rank's part of the loss; return that part, () in nats, or 0.0 without any loss.

    loss_sums: for each micro-batch the sum of its token losses, (); a lazy iterable, so that the activations of one
    micro-batch are freed before the next forward. weight: w_i, as given to `all_reduce_token_count`. count: what
    `all_reduce_token_count` returned; if its value is 0, no backward is run.
    """
    loss = 0.0
    for loss_sum in loss_sums:
        if count.value == 0:
            continue
        share = loss_sum * weight / count.value
        share.backward()
        loss = loss + share.detach()
    return loss
