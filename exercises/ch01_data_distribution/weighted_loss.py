"""Normalize by the global token count.

Write the missing lines of count_tokens and backward; its docstring specifies the result.
You may call: Count, sum, torch.tensor, Tensor.backward, Tensor.detach.
Check it with: python -m exercises check weighted_loss

Stub 59bee821.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from minidist.comm import Group
from minidist.train.loss import Count


def count_tokens(counts: Iterable[int], weight: float, group: Group) -> Count:
    """The weighted number of tokens that count in the global batch, on its way: sum_i w_i n_i over the ranks i.

    counts: tokens that count in each of this rank's micro-batches. weight: w_i, of this rank's data.
    """
    raise NotImplementedError("return a Count of this rank's weighted token count, a float64 tensor of shape (1,)")


def backward(loss_sums: Iterable[Tensor], weight: float, count: Count) -> float | Tensor:
    """Run backward of this rank's part of the loss; return that part, () in nats, or 0.0 without any loss.

    loss_sums: of each micro-batch, the sum of the losses of its tokens, (). They are computed as they are asked for,
    so that the activations of one micro-batch are freed before those of the next are made. weight: w_i, the one given
    to `count_tokens`; count: what that returned, a number in `count.value`. When it is 0 there is no backward.
    """
    raise NotImplementedError("run backward for one loss sum after the other; return this rank's part of the loss")
