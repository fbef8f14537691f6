"""Cross-entropy with vocabulary-sharded logits: the solution, as it stands in minidist.parallel.tensor.vocabulary.

Three numbers per position cross the network: the largest logit, the sum of the exponentials and the logit of the
label. The logits themselves would be as many numbers as the vocabulary has entries, and no rank ever allocates all of
them. The largest logit must be the one over all ranks: with its own maximum each rank would scale its exponentials
differently.

Backward needs no communication. Every rank has the normalizer, so it has the probabilities of its own columns, and
only the rank that has the label's column subtracts the 1.

Usual wrong answers:
* calls the package's class
* returns the loss of a uniform prediction
* all-gathers the logits of all positions
* counts ignored labels
* ignored positions get a gradient
* ignores the incoming gradient
* adds a local logit for a label that another rank holds
* overwrites the logits with the exponentials
* returns the mean loss instead of the sum
* exponentials of large logits overflow
* allocates a one-hot table for each use, and keeps all of them
* every rank subtracts the 1 of the label from one of its columns
* each rank subtracts its own maximum, so the sums have different scales
* applies torch's cross-entropy to this rank's columns
* sends unneeded probabilities in backward
* returns zeros
"""

import torch
from torch import Tensor

from minidist.comm import Group
from minidist.comm import functional as ops
from minidist.parallel.tensor.vocabulary import IGNORE_INDEX


class _CrossEntropy(torch.autograd.Function):
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
        self._first, self._group = first, group

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Collective: return the sum of the token losses, and their number, both the same on all ranks.

        logits: (b, s, n), this rank's shard. labels: (b, s) int64; a label of -100 does not count.
        """
        logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        total = _CrossEntropy.apply(logits, labels.flatten(), self._first, self._group.key)
        return total, (labels != IGNORE_INDEX).sum()
