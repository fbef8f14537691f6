"""Waits for the count before it asks for the first loss, and weighs each micro-batch."""

import torch

from minidist.train.loss import Count


def count_tokens(counts, weight, group):
    weighted = [weight * n for n in counts]
    return Count(torch.tensor([float(sum(weighted))], dtype=torch.float64), group)


def backward(loss_sums, weight, count):
    parts = [0.0]
    if count.value > 0:
        for loss_sum in loss_sums:
            part = weight * (loss_sum / count.value)
            part.backward()
            parts.append(part.item())
    return sum(parts)
