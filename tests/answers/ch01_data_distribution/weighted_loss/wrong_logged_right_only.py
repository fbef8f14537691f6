"""uneven_padding: the loss that is returned is right, the gradient is that of the sum"""

import torch

from minidist.train.loss import Count


def count_tokens(counts, weight, group):
    mine = torch.tensor([sum(counts) * weight], dtype=torch.float64)
    return Count(mine, group)


def backward(loss_sums, weight, count):
    loss = 0.0
    for loss_sum in loss_sums:
        if count.value == 0:
            continue
        share = loss_sum * weight / count.value
        loss_sum.backward()
        loss = loss + share.detach()
    return loss
