"""Normalize by the global token count.

Write the missing lines of count_tokens and backward; its docstring specifies the result.
You may call: Count, sum, torch.tensor, Tensor.backward, Tensor.detach.
Check it with: python -m exercises check weighted_loss

Stub ca8ecc6f.
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
    raise NotImplementedError("return a Count of this rank's weighted token count, a float64 tensor of shape (1,)")


def backward(loss_sums: Iterable[Tensor], weight: float, count: Count) -> float | Tensor:
    """Run backward of this rank's part of the loss; returns that part, () in nats, or 0.0 without any loss.

    loss_sums: for each micro-batch the sum of its token losses, (); a lazy iterable, so that the activations of one
    micro-batch are freed before the next forward. weight: w_i, as given to `count_tokens`. count: the result of
    `count_tokens`; if its value is 0, no backward is run.
    """
    raise NotImplementedError("run backward for one loss sum after the other; return this rank's part of the loss")
