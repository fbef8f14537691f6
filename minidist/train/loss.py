"""The loss contract: theta <- theta - lr * sum_i w_i grad_i is the step of one process, however the batch is cut.

The loss of a step is the weighted sum of the losses of all tokens that count, divided by their weighted number. That
number, the count, is known from the labels: it is summed over the ranks once, before the first backward. Every
micro-batch's loss sum is divided by it before its backward, and by nothing after. Then gradients need only be summed,
over micro-batches and over ranks. A mean per rank or per micro-batch, averaged again, is another loss as soon as
padding is uneven: it counts the tokens of a short part more than those of a long one.
"""

from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor

from minidist.comm import Group, all_reduce


class Count:
    """A number that is being summed over a group while something else is computed.

    mine: this rank's part, (1,) float64.
    """

    def __init__(self, mine: Tensor, group: Group):
        self._total = mine
        self._handle = all_reduce(self._total, group, async_op=True)

    @cached_property
    def value(self) -> float:
        """The sum; waits for it the first time."""
        self._handle.wait(host=True)
        return self._total.item()


def count_tokens(counts: Iterable[int], weight: float, group: Group) -> Count:
    """The weighted number of tokens that count in the global batch, on its way: sum_i w_i n_i over the ranks i.

    counts: tokens that count in each of this rank's micro-batches. weight: w_i, of this rank's data.
    """
    mine = torch.tensor([sum(counts) * weight], dtype=torch.float64, device=group.world.control_device)
    return Count(mine, group)


def backward(loss_sums: Iterable[Tensor], weight: float, count: Count) -> float | Tensor:
    """Run backward of this rank's part of the loss; return that part, () in nats, or 0.0 without any loss.

    loss_sums: of each micro-batch, the sum of the losses of its tokens, (). They are computed as they are asked for,
    so that the activations of one micro-batch are freed before those of the next are made. weight: w_i, the one given
    to `count_tokens`; count: what that returned, a number in `count.value`. When it is 0 there is no backward.
    """
    loss = 0.0
    for loss_sum in loss_sums:
        if count.value == 0:
            continue
        share = loss_sum * weight / count.value
        share.backward()
        loss = loss + share.detach()
    return loss
