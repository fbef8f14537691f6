"""nothing_counts: a count of 0 is taken for 1, and the optimizer steps on a gradient of zeros"""

import torch

from minidist.train.loss import Count


def count_tokens(counts, weight, group):
    mine = torch.tensor([sum(counts) * weight], dtype=torch.float64)
    return Count(mine, group)


def backward(loss_sums, weight, count):
    loss = 0.0
    for loss_sum in loss_sums:
        share = loss_sum * weight / (count.value or 1)
        share.backward()
        loss = loss + share.detach()
    return loss
