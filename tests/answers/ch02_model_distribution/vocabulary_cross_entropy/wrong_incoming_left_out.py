"""gradients_are_those_of_one_process: whatever is made of the loss, the gradient is that of the loss itself"""

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
        shifted = logits - ops.largest(logits.amax(1), key)[:, None]
        at_label = shifted.gather(1, column)[:, 0].masked_fill(~mine, 0)
        exponentials = shifted.exp_()
        normalizer, at_label = ops.all_reduce(torch.stack((exponentials.sum(1), at_label)), key)
        ctx.save_for_backward(exponentials.div_(normalizer[:, None]), column, mine, counts)
        return ((normalizer.log() - at_label) * counts).sum()

    @staticmethod
    def backward(ctx, grad):
        probabilities, column, mine, counts = ctx.saved_tensors
        each = probabilities * counts[:, None]
        return each.scatter_add_(1, column, -mine[:, None].to(each.dtype)), None, None, None


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
