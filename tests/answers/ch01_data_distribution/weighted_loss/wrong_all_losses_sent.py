"""counted_once: the counts of all micro-batches are sent, where their sum would do"""

import torch

from minidist.train.loss import Count


def count_tokens(counts, weight, group):
    mine = torch.zeros(8, dtype=torch.float64)
    mine[: len(list(counts))] = torch.tensor(list(counts), dtype=torch.float64) * weight
    return Total(Vector(mine, group))


class Vector(Count):
    pass


class Total:
    def __init__(self, vector):
        vector._handle.wait()
        self.value = vector._total.sum().item()


def backward(loss_sums, weight, count):
    loss = 0.0
    for loss_sum in loss_sums:
        if count.value == 0:
            continue
        share = loss_sum * weight / count.value
        share.backward()
        loss = loss + share.detach()
    return loss
