"""Each rank takes the logarithm of its own sum, and the sums are put together by their logarithms."""

import torch
from torch import Tensor

from minidist.comm import Group
from minidist.comm import functional as ops
from minidist.parallel.tensor.vocabulary import IGNORE


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, first, key):
        counts = labels != IGNORE
        local = labels - first
        mine = counts & (local >= 0) & (local < logits.shape[1])
        column = local.masked_fill(~mine, 0)[:, None]
        # The largest logit is subtracted so that no exponential overflows; it cancels, and so has no gradient.
        own = logits.logsumexp(1)
        largest = ops.largest(own, key)
        at_label = logits.gather(1, column)[:, 0].masked_fill(~mine, 0)
        total, at_label = ops.all_reduce(torch.stack(((own - largest).exp(), at_label)), key)
        normalizer = largest + total.log()
        ctx.save_for_backward((logits - normalizer[:, None]).exp_(), column, mine, counts)
        return ((normalizer - at_label) * counts).sum()

    @staticmethod
    def backward(ctx, grad):
        probabilities, column, mine, counts = ctx.saved_tensors
        each = probabilities * (counts * grad)[:, None]
        return each.scatter_add_(1, column, -(mine * grad)[:, None]), None, None, None


class VocabularyLoss:
    """`token_loss` on logits of which every rank holds those of `n` tokens, `first` on. A callable.

    "fuse the output of the parallel GEMM with the cross entropy loss" (Shoeybi et al. 2019, section 3): three numbers
    per position pass between ranks, instead of one per token of the vocabulary.
    """

    def __init__(self, first: int, group: Group):
        self._first, self._group = first, group

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """logits (b, s, n), labels (b, s) int64 -> the sum of the losses that count, and their number, on each rank."""
        logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        total = _CrossEntropy.apply(logits, labels.flatten(), self._first, self._group.key)
        return total, (labels != IGNORE).sum()
