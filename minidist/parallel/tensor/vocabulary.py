"""Embedding and loss with a sharded vocabulary: no rank ever holds the logits of all tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.comm import Group
from minidist.comm import functional as ops
from minidist.parallel.tensor.operators import Operator


class VocabParallelEmbedding(nn.Module):
    """Rows `first` to `first + n` of an embedding, (b, s) int64 -> (b, s, h), or this rank's sequence shard of it.

    weight: (n, h). leave: the operator that sums over the ranks; a token of another rank's rows gives zeros here.
    """

    def __init__(self, weight: Tensor, first: int, leave: Operator):
        super().__init__()
        self.weight, self._first, self._leave = nn.Parameter(weight), first, leave

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self._first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self._leave(rows.masked_fill(elsewhere[..., None], 0))


IGNORE = -100  # as in torch: a label with this value does not count


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, first, key):
        counts = labels != IGNORE
        local = labels - first
        mine = counts & (local >= 0) & (local < logits.shape[1])
        column = local.masked_fill(~mine, 0)[:, None]
        # The largest logit is subtracted so that no exponential overflows; it cancels, and so has no gradient.
        shifted = logits - ops.all_reduce_max(logits.amax(1), key)[:, None]
        at_label = shifted.gather(1, column)[:, 0].masked_fill(~mine, 0)
        exponentials = shifted.exp_()
        normalizer, at_label = ops.all_reduce(torch.stack((exponentials.sum(1), at_label)), key)
        ctx.save_for_backward(exponentials.div_(normalizer[:, None]), column, mine, counts)
        return ((normalizer.log() - at_label) * counts).sum()

    @staticmethod
    def backward(ctx, grad):
        probabilities, column, mine, counts = ctx.saved_tensors
        each = probabilities * (counts * grad)[:, None]
        return each.scatter_add_(1, column, -(mine * grad)[:, None]), None, None, None


class VocabParallelLoss:
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
