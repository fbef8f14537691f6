"""Cross-entropy with vocabulary-sharded logits: the solution, as it stands in minidist.parallel.tensor.simple.

Three numbers per position cross the network: the largest logit, the sum of the exponentials and the logit of the
label. The logits themselves would be as many numbers as the vocabulary has entries, and no rank ever allocates all of
them. The largest logit must be the one over all ranks: with its own maximum each rank would scale its exponentials
differently.

Backward needs no communication. All ranks compute the same loss, so the gradient of a sum over the ranks is passed to
each rank's term unchanged. An all-reduce that autograd differentiates as a sum over the losses of all ranks would
all-reduce the gradient as well, and count the one loss once per rank. The fast version writes backward itself, and
keeps the probabilities only.

Usual wrong answers:
* the package's own
* returns one number for every result
* all-gathers the logits of all positions
* uses an all-reduce whose backward is an all-reduce too, so that the gradient is counted once for each rank
* adds the losses of ignored labels
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
* subtracts the sum of the ranks' maxima: right while no exponential overflows or vanishes
* sums a detached copy, so that the loss has no gradient
* returns zeros
"""

import torch
from torch import Tensor

from minidist.comm import Group
from minidist.comm import functional as ops
from minidist.labels import IGNORE_INDEX
from minidist.parallel.tensor.simple import TensorParallelRegion


def vocab_parallel_loss(logits: Tensor, labels: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Collective: return the sum and number of the tokens' losses; logits (b, s, V / n), labels (b, s) int64."""
    local, is_counted = labels - group.rank * logits.shape[-1], labels != IGNORE_INDEX
    is_here = (local >= 0) & (local < logits.shape[-1])
    shifted = logits - ops.all_reduce_max(logits.detach().amax(-1), group.key)[..., None]  # so that no exp overflows
    at_label = shifted.gather(-1, local.where(is_here, 0)[..., None])[..., 0] * is_here
    normalizer, at_label = TensorParallelRegion(group).leave(torch.stack((shifted.exp().sum(-1), at_label)))
    return ((normalizer.log() - at_label) * is_counted).sum(), is_counted.sum()
