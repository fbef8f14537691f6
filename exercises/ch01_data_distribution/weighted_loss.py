"""Normalize by the global token count.

Write the missing lines of all_reduce_token_count and backward; their docstrings specify the results.
You may call: AsyncSum, sum, torch.tensor, Tensor.backward, Tensor.detach.
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
