"""weights_of_data: wrong on one rank only, whose weight is forgotten when it is the third"""

import torch

from minidist.train.loss import Count


def count_tokens(counts, weight, group):
    mine = torch.tensor([sum(counts) * (1.0 if group.rank == 2 else weight)], dtype=torch.float64)
    return Count(mine, group)


def backward(loss_sums, weight, count):
    loss = 0.0
    for loss_sum in loss_sums:
        if count.value == 0:
            continue
        share = loss_sum * weight / count.value
        share.backward()
        loss = loss + share.detach()
    return loss
