"""a_rank_without_samples: a rank without tokens does not take part in the count"""

import torch

from minidist.train.loss import Count


class Nothing:
    value = 0.0


def count_tokens(counts, weight, group):
    if sum(counts) == 0:
        return Nothing()
    return Count(torch.tensor([sum(counts) * weight], dtype=torch.float64), group)


def backward(loss_sums, weight, count):
    loss = 0.0
    for loss_sum in loss_sums:
        if count.value == 0:
            continue
        share = loss_sum * weight / count.value
        share.backward()
        loss = loss + share.detach()
    return loss
