"""uneven_padding: no count and no backward"""

import torch

from minidist.train.loss import Count


def count_tokens(counts, weight, group):
    return Count(torch.zeros(1, dtype=torch.float64), group)


def backward(loss_sums, weight, count):
    return 0.0
