"""Embedding and cross-entropy over a sharded vocabulary: the solution, as it stands in minidist.simple.tensor_parallel.

A rank that does not have a token contributes zeros to the sum of the embeddings, so the sum is the embedding.
Backward is right by itself: the zeros are a product with 0, which stops the gradient of a row that was looked up by
mistake.

Three numbers per position cross the network for the loss: the largest logit, the sum of the exponentials and the
logit of the label. The logits themselves would be as many numbers as the vocabulary has entries, and no rank ever
allocates all of them. The largest logit must be the one over all ranks: with its own maximum each rank would scale
its exponentials differently.

Backward needs no communication. All ranks compute the same loss, so the gradient of a sum over the ranks is passed to
each rank's term unchanged. An all-reduce that autograd differentiates as a sum over the losses of all ranks would
all-reduce the gradient as well, and count the one loss once per rank. The fast version writes backward itself, and
keeps the probabilities only.

Usual wrong answers:
* the package's own
* returns one number for every result
* returns new zeros if all labels are ignored, which have no gradient function
* also enters the region, so that the gradient of the rows is summed over the ranks
* its rows are a view, which keeps the whole embedding in memory
* keeps the whole embedding and adds it once, on rank 0
* keeps the zeros for tokens that another rank holds
* finds its rows by the rank among all processes
* all-reduces the tokens' rows and, for no purpose, which tokens were found
* computes in float32, also for float64 logits
* all-gathers the logits of all positions
* uses an all-reduce whose backward is an all-reduce too, so that the gradient is counted once for each rank
* adds the losses of ignored labels
* computes the loss of bfloat16 logits in bfloat16
* knows bfloat16 as the only narrow dtype, and computes the loss of float16 logits in float16
* adds the logit of a local column for a label that another rank holds
* subtracts the largest logit in place
* returns the mean loss instead of the sum
* exponentials of large logits overflow
* returns the number of positions, ignored ones included
* keeps several one-hot tables of the labels
* takes the first label of the next rank for its own
* each rank subtracts its own maximum, so the sums have different scales
* uses the rank among all processes to find its columns
* applies torch's cross-entropy to this rank's columns
* adds row 0 for a token that another rank holds
* subtracts the sum of the ranks' maxima: right while no exponential overflows or vanishes
* sums a detached copy, so that the loss has no gradient
* returns zeros
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.comm import Group
from minidist.data.loader import IGNORE_INDEX
from minidist.models.layers import at_least_float32
from minidist.simple.tensor_parallel import Region, shard_weight, sum_over_ranks


class VocabParallelEmbedding(nn.Module):
    """The embedding; each rank has the rows of 1/n of the vocabulary: (b, s) int64 -> (b, s, h)."""

    def __init__(self, embedding: nn.Module, region: Region):
        super().__init__()
        self.region = region
        self.weight = shard_weight(embedding, 0, region.group).weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Collective: look up the tokens; each rank contributes the rows that it has, and zeros."""
        local = tokens - self.region.group.rank * len(self.weight)
        is_here = (local >= 0) & (local < len(self.weight))
        rows = F.embedding(local.where(is_here, 0), self.weight)
        return self.region.leave(rows * is_here[..., None])


def vocab_parallel_loss(logits: Tensor, labels: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Collective: return the sum of the tokens' cross-entropies, in nats, and their number, equal on all ranks.

    logits: (b, s, vocab / n). labels: (b, s) int64; IGNORE_INDEX is left out. No rank needs all logits: the ranks
    exchange three numbers per token: the largest logit, the sum of the exponentials, the logit of the label.
    """
    logits = logits.to(at_least_float32(logits.dtype))
    # The largest logit cancels in the loss, so it has no gradient; without it an exponential could overflow.
    shifted = logits - sum_over_ranks(logits.amax(-1), group, "max")[..., None]
    local = labels - group.rank * logits.shape[-1]
    is_here = (local >= 0) & (local < logits.shape[-1])
    at_label = shifted.gather(-1, local.where(is_here, 0)[..., None])[..., 0] * is_here
    normalizer, at_label = Region(group).leave(torch.stack((shifted.exp().sum(-1), at_label)))
    is_counted = labels != IGNORE_INDEX
    return ((normalizer.log() - at_label) * is_counted).sum(), is_counted.sum()
