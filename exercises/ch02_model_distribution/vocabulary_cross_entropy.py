"""Cross-entropy with vocabulary-sharded logits.

Each of n ranks has the logits of V / n consecutive tokens of the vocabulary: rank 0 those of the first ones. Write the
cross-entropy summed over all positions, so that three numbers per position are reduced over the ranks, and no logits.

logits: (b, s, V / n), fp32 or fp64; not changed. labels: (b, s) int64, equal on all ranks, from 0
to V - 1, or IGNORE_INDEX (-100) at positions that do not count. Returns the sum of the losses, a tensor of shape () in
the dtype of the logits with a gradient function, and the number of positions that count, () int64. All ranks compute
the same loss, so backward must give each rank the gradient of that one loss for its own logits, without a message.
Example: V = 4 on 2 ranks, one position, all logits 0 and the label 2, which rank 1 has.
    Both ranks return log 4 = 1.3863 and 1. The gradients are [[[0.25, 0.25]]] on rank 0, [[[-0.75, 0.25]]] on rank 1.

Checked: loss, number and gradients on 1 to 4 ranks against one process in float64, with ignored labels, also all of
them; logits of thousands; the number of bytes in forward, and none in backward; memory of at most six copies of the
rank's logits; and float32, equal bits on all ranks and groups of some ranks, on 1 to 7 ranks.

You may call:
    ops.all_reduce_max(tensor, group.key)   the elementwise maximum over the ranks, a new tensor, without a gradient
    TensorParallelRegion(group).leave(tensor)   the sum over the ranks; its backward sends nothing: exercise 2.1
    group.rank, group.size; Tensor.amax(dim), Tensor.detach(), Tensor.exp(), Tensor.log(), torch.stack
    Tensor.gather(-1, index), index (b, s, 1) int64; Tensor.where(condition, other)

Check it with: python -m exercises check vocabulary_cross_entropy

Stub 632a6b90.
"""

import torch
from torch import Tensor

from minidist.comm import Group
from minidist.comm import functional as ops
from minidist.labels import IGNORE_INDEX
from minidist.parallel.tensor.simple import TensorParallelRegion


def vocab_parallel_loss(logits: Tensor, labels: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Collective: return the sum and number of the tokens' losses; logits (b, s, V / n), labels (b, s) int64."""
    raise NotImplementedError("return the sum of the losses of all counted positions, and their number")
