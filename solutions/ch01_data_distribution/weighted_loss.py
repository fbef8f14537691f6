"""Normalize by the global token count: the solution, as it stands in minidist.train.loss.

The gradient of a sum is the sum of the gradients. A loss that is a sum divided by one constant may therefore be split
in any way: by sample, by micro-batch, by rank. A mean may not. If ranks with unequal token counts average their own
means, the run minimizes another loss than one process does, and no loss curve shows it. The count is known from the
labels alone, so its all-reduce, one message of eight bytes, overlaps with the first forward.

The weight enters twice: theta <- theta - lr * sum_i w_i grad_i, where grad_i is the gradient of rank i's loss sum
divided by sum_i w_i n_i. A weight that multiplies only the losses also changes the learning rate.

Usual wrong answers:
* the counts of all micro-batches are sent, where their sum would do
* calls the package's own
* divides by a number that has nothing to do with the tokens
* the count is sent when the first backward is about to begin
* every micro-batch has a count of its own sent
* the gradient is divided again by the number of micro-batches
* divides by zero when no token counts
* a count of 0 is taken for 1, and the optimizer steps on a gradient of zeros
* the count is summed in float32, which has no number for 2**24 + 1
* wrong on four ranks only, where the count is halved
* the returned loss holds the graph of every micro-batch
* a rank without tokens does not take part in the count
* wrong on one rank only, whose weight is forgotten when it is the third
* every rank divides by the number of its own tokens
* the loss that is returned is right, the gradient is that of the sum
* each rank takes the mean of its own tokens, and the means are averaged
* each micro-batch takes the mean of its own tokens, and the means are averaged
* all forwards first, then one backward of their sum, with all activations alive
* a count below 1 is taken for 0, and small weights train nothing
* the sum of the count is waited for before the first forward may begin
* the weight multiplies the count and not the loss
* the weight multiplies the loss and not the count, and so changes the learning rate
* the weight multiplies the loss twice
* no count and no backward
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from minidist.comm import Group
from minidist.train.loss import Count


def count_tokens(counts: Iterable[int], weight: float, group: Group) -> Count:
    """Start the all-reduce of the global batch's weighted number of tokens: sum_i w_i n_i over the ranks i.

    counts: number of tokens with a loss in each of this rank's micro-batches. weight: w_i, of this rank's data.
    """
    mine = torch.tensor([sum(counts) * weight], dtype=torch.float64, device=group.world.control_device)
    return Count(mine, group)


def backward(loss_sums: Iterable[Tensor], weight: float, count: Count) -> float | Tensor:
    """Run backward of this rank's part of the loss; returns that part, () in nats, or 0.0 without any loss.

    loss_sums: for each micro-batch the sum of its token losses, (); a lazy iterable, so that the activations of one
    micro-batch are freed before the next forward. weight: w_i, as given to `count_tokens`. count: the result of
    `count_tokens`; if its value is 0, no backward is run.
    """
    loss = 0.0
    for loss_sum in loss_sums:
        if count.value == 0:
            continue
        share = loss_sum * weight / count.value
        share.backward()
        loss = loss + share.detach()
    return loss
