"""Normalize by the global token count: the solution, as it stands in minidist.train.loss.

The gradient of a sum is the sum of the gradients. A loss that is a sum divided by one constant may therefore be split
in any way: by sample, by micro-batch, by rank. A mean may not. If ranks with unequal token counts average their own
means, the run minimizes another loss than one process does, and no loss curve shows it. The count is known from the
labels alone, so its all-reduce, one message of eight bytes, overlaps with the first forward.

The weight enters twice: theta <- theta - lr * sum_i w_i grad_i, where grad_i is the gradient of rank i's loss sum
divided by sum_i w_i n_i. A weight that multiplies only the losses also changes the learning rate.

Usual wrong answers:
* all-reduces the counts of all micro-batches instead of their sum
* calls the package's function
* divides by a number that does not depend on the tokens
* launches the all-reduce of the count only before the first backward
* all-reduces a count per micro-batch
* reads counts twice, although it may be an iterator
* also divides the gradient by the number of micro-batches
* divides by zero if no token counts
* treats a count of 0 as 1, so the optimizer steps on a gradient of zeros
* sums the count in float32, which cannot represent 2**24 + 1
* halves the count, on four ranks only
* the returned loss keeps the autograd graph of every micro-batch
* a rank without tokens skips the all-reduce of the count
* ignores the weight, on the third rank only
* every rank divides by its own token count
* returns the right loss, but the gradient is that of the sum
* averages the per-rank means
* averages the means of the micro-batches
* runs all forwards, then one backward of their sum, with all activations in memory
* retain_graph=True, which keeps the activations of a micro-batch
* treats a count below 1 as 0, so small weights train nothing
* waits for the count before the first forward
* multiplies the count by the weight, but not the loss
* multiplies the loss by the weight, but not the count: the learning rate changes
* multiplies the loss by the weight twice
* sends no count and runs no backward
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from minidist.comm import Group
from minidist.train.loss import AsyncSum


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
