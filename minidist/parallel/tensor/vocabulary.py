"""Vocabulary-parallel embedding and loss: no rank ever has the logits of the whole vocabulary."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.comm import Group
from minidist.comm import functional as ops
from minidist.labels import IGNORE_INDEX
from minidist.parallel.tensor.operators import Operator


class VocabParallelEmbedding(nn.Module):
    """An embedding whose vocabulary is sharded over the ranks: (b, s) int64 -> (b, s, h).

    weight: (n, h), the rows of tokens `first` to `first + n - 1`. leave: the operator that sums the ranks' results, the
    second of `region_operators`; with sequence parallelism it returns (b, s / ranks, h).
    """

    def __init__(self, weight: Tensor, first: int, leave: Operator):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self._first = first
        self._leave = leave

    def forward(self, tokens: Tensor) -> Tensor:
        """Collective: return the embeddings of `tokens` (b, s), to which each rank contributes its rows."""
        local = tokens - self._first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self._leave(rows.masked_fill(elsewhere[..., None], 0))


class _CrossEntropy(torch.autograd.Function):
    """The sum of the token losses, from logits (tokens, n) sharded over the vocabulary, with its own backward.

    labels: (tokens,). first: first token id of this rank's shard. key: the `Group.key` of the ranks.
    """

    @staticmethod
    def forward(ctx, logits, labels, first, key):
        counts = labels != IGNORE_INDEX
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
    """Cross-entropy on logits whose vocabulary is sharded over the ranks of `group`; called like `cross_entropy_sum`.

    first: the first token id of this rank's shard, which has the logits of the n tokens `first` to `first + n - 1`.

    Ranks exchange three numbers per position, instead of one per token of the vocabulary: "fuse the output of the
    parallel GEMM with the cross entropy loss" (Shoeybi et al. 2019, section 3).
    """

    def __init__(self, first: int, group: Group):
        self._first = first
        self._group = group

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Collective: return the sum of the token losses, and their number, both the same on all ranks.

        logits: (b, s, n), this rank's shard. labels: (b, s) int64; IGNORE_INDEX does not count.
        """
        logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        total = _CrossEntropy.apply(logits, labels.flatten(), self._first, self._group.key)
        return total, (labels != IGNORE_INDEX).sum()
