"""Normalize by the global token count.

The loss of a step is sum_i w_i (loss sum of rank i) / sum_i w_i n_i, where n_i is the number of tokens of rank i that
count. Write the all-reduce of the denominator, which is launched before the first forward, and the backward of this
rank's part of the loss, one micro-batch after the other.

all_reduce_token_count: counts has one integer per micro-batch, w_i is `weight`; returns an AsyncSum of one float64
number, in flight. backward: loss_sums yields the summed loss of each micro-batch, a tensor of shape (), and runs that
micro-batch's forward when it is asked for it; `count` is the AsyncSum. Returns this rank's part of the loss,
detached. If the count is 0, no backward runs and the result is 0.0.
Example: rank 0 has micro-batches with 3 and 1 tokens and weight 1, rank 1 has one with 2 tokens and weight 2. The
    count is 1 * 4 + 2 * 2 = 8 on both. If rank 1's loss sum is 6, its part of the loss is 2 * 6 / 8 = 1.5.

Checked: loss and gradients of one process, with unequal counts, with weights, with ranks without tokens or of weight
0, and if no token counts at all; that one number is all-reduced, once, without waiting; counts above 2**24; that the
backward of a micro-batch ends before the next forward begins.

You may call:
    AsyncSum(tensor, group)   all-reduces `tensor`, of shape (1,); its .value waits and returns the sum, a float
    torch.tensor([number], dtype=torch.float64, device=group.world.control_device)
    Tensor.backward()   adds to the gradients; Tensor.detach()   the number without its graph

Check it with: python -m exercises check weighted_loss

Stub dbb40956.
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
    raise NotImplementedError("return an AsyncSum of this rank's weighted token count, a float64 tensor of shape (1,)")


def backward(loss_sums: Iterable[Tensor], weight: float, count: AsyncSum) -> float | Tensor:
    """Run backward of this rank's part of the loss; return that part, () in nats, or 0.0 without any loss.

    loss_sums: for each micro-batch the sum of its token losses, (); a lazy iterable, so that the activations of one
    micro-batch are freed before the next forward. weight: w_i, as given to `all_reduce_token_count`. count: what
    `all_reduce_token_count` returned; if its value is 0, no backward is run.
    """
    raise NotImplementedError("run backward for one loss sum after the other; return this rank's part of the loss")
