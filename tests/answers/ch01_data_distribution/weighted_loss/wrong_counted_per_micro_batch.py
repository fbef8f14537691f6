"""counted_once: every micro-batch has a count of its own sent"""

import torch

from minidist.train.loss import Count


def count_tokens(counts, weight, group):
    parts = [Count(torch.tensor([n * weight], dtype=torch.float64), group) for n in [*counts, 0, 0, 0][:3]]
    return Total(parts)


class Total:
    def __init__(self, parts):
        self.value = sum(part.value for part in parts)


def backward(loss_sums, weight, count):
    loss = 0.0
    for loss_sum in loss_sums:
        if count.value == 0:
            continue
        share = loss_sum * weight / count.value
        share.backward()
        loss = loss + share.detach()
    return loss
