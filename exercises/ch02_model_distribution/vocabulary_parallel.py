"""Embedding and cross-entropy over a sharded vocabulary.

Each of n ranks has V / n consecutive tokens of the vocabulary: rank 0 the first ones. Write the embedding, from which
each rank looks up its own tokens, and the cross-entropy, which reduces three numbers per position and no logits.

VocabParallelEmbedding: `weight`, (V / n, h), is this rank's part of embedding.weight (V, h). forward: tokens (b, s)
int64, equal on all ranks -> (b, s, h), or (b, s / n, h) in a region that shards the sequence.
vocab_parallel_loss: logits (b, s, V / n), this rank's. labels (b, s) int64, equal on all ranks, from 0 to V - 1, or
IGNORE_INDEX (-100) at positions that do not count. Returns the sum of the losses, of shape (), with a gradient
function, in the dtype of the logits but at least float32; and the number of positions that count, () int64. Tokens,
logits and labels do not change.
All ranks compute the same loss, so backward must give each rank the gradient of that one loss for its own logits,
without a message.
Example: V = 4 on 2 ranks, h = 1, the embedding [[10], [20], [30], [40]].
    For the tokens [[3, 0]] rank 0 contributes [[[0], [10]]] and rank 1 [[[40], [0]]]: both get [[[40], [10]]].
    One position, all logits 0 and the label 2, which rank 1 has. Both ranks return log 4 = 1.3863 and 1. The gradients
    are [[[0.25, 0.25]]] on rank 0, [[[-0.75, 0.25]]] on rank 1.

Checked: embedding, loss, count and all gradients on 1 to 4 ranks against one process in float64, with ignored labels,
also all of them; bfloat16 logits; logits of thousands; a region with the sequence sharded; that the rank's part of the
embedding is contiguous and no view; one collective for the embedding, at most three numbers per position for the loss,
and no messages in their backward unless the sequence is sharded; memory of at most six copies of the rank's logits; and
float32, equal bits on all ranks and groups of some ranks, on 1 to 7 ranks.

You may call:
    shard_weight(module, dim, group)   replaces module.weight by this rank's shard along dim; returns the module: 2.2
    sum_over_ranks(x, group, "max")   the elementwise maximum over the ranks, a new tensor, without a gradient: 2.1
    region.leave(x), Region(group).leave(x)   the sum over the ranks; with all tokens on every rank its backward sends
        nothing: exercise 2.1; region.group, group.rank, group.size
    at_least_float32(dtype)   float32 for narrower dtypes, else dtype; F.embedding(rows, weight); torch.stack
    Tensor.gather(-1, index), index (b, s, 1) int64; Tensor.where(condition, other); Tensor.amax(dim)

Check it with: python -m exercises check vocabulary_parallel

Stub ad18217c.
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
        raise NotImplementedError("keep the region and this rank's rows")

    def forward(self, tokens: Tensor) -> Tensor:
        """Collective: look up the tokens; each rank contributes the rows that it has, and zeros."""
        raise NotImplementedError("return the embeddings of the tokens")


def vocab_parallel_loss(logits: Tensor, labels: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Collective: return the sum of the tokens' cross-entropies, in nats, and their number, equal on all ranks.

    logits: (b, s, vocab / n). labels: (b, s) int64; IGNORE_INDEX is left out. No rank needs all logits: the ranks
    exchange three numbers per token: the largest logit, the sum of the exponentials, the logit of the label.
    """
    raise NotImplementedError("return the sum of the losses of all counted positions, and their number")
