"""Sums the counts in a tensor, and the losses too."""

import torch

from minidist.train.loss import Count


def count_tokens(counts, weight, group):
    mine = torch.tensor([0.0, *counts], dtype=torch.float64).sum(0, keepdim=True) * weight
    return Count(mine, group)


def backward(loss_sums, weight, count):
    loss = torch.zeros(())
    for loss_sum in loss_sums:
        if count.value == 0:
            break
        scale = weight / count.value
        (loss_sum * scale).backward()
        loss = loss + loss_sum.detach() * scale
    return loss
