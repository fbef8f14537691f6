"""Cross-entropy with vocabulary-sharded logits: the solution, as it stands in minidist.parallel.tensor.vocabulary.

Three numbers per position cross the network: the largest logit, the sum of the exponentials and the logit of the
label. The logits themselves would be as many numbers as the vocabulary has entries, and no rank ever allocates all of
them. The largest logit must be the one over all ranks: with its own maximum each rank would scale its exponentials
differently.

Backward needs no communication. Every rank has the normalizer, so it has the probabilities of its own columns, and
only the rank that has the label's column subtracts the 1.

Usual wrong answers:
* the package's own
* the loss of a model that knows nothing
* every rank gets all logits of all positions
* labels that do not count are counted
* positions that do not count get a gradient all the same
* whatever is made of the loss, the gradient is that of the loss itself
* every rank adds a logit of its own for a label that is another rank's
* the exponentials are written over the logits
* the mean of the losses in the place of their sum
* exponentials of large logits overflow
* a table of ones and zeros for each use, and all of them kept
* every rank takes the 1 of the label off one of its columns
* each rank subtracts the largest of its own logits, and the sums are of different scales
* torch's own on this rank's columns
* backward sends probabilities that nobody needs
* zeros
"""

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
