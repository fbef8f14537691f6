"""weights_of_data: a count below 1 is taken for 0, and small weights train nothing"""

import torch

from minidist.train.loss import Count


def count_tokens(counts, weight, group):
    mine = torch.tensor([sum(counts) * weight], dtype=torch.float64)
    return Count(mine, group)


def backward(loss_sums, weight, count):
    loss = 0.0
    for loss_sum in loss_sums:
        if count.value < 1:
            continue
        share = loss_sum * weight / count.value
        share.backward()
        loss = loss + share.detach()
    return loss
