"""uneven_padding: each micro-batch takes the mean of its own tokens, and the means are averaged"""

import torch

from minidist.train.loss import Count


def count_tokens(counts, weight, group):
    counts = list(counts)
    count = Count(torch.tensor([sum(counts) * weight], dtype=torch.float64), group)
    count.counts, count.ranks = [n for n in counts if n], group.size
    return count


def backward(loss_sums, weight, count):
    loss = 0.0
    for i, loss_sum in enumerate(loss_sums):
        if count.value == 0:
            continue
        share = loss_sum * weight / count.counts[i] / len(count.counts) / count.ranks
        share.backward()
        loss = loss + share.detach()
    return loss
