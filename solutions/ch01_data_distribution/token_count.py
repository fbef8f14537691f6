"""The token count of the global batch: the solution, as it stands in minidist.simple.data_parallel.

The gradient of a sum is the sum of the gradients. A loss that is a sum divided by one constant may therefore be split
in any way: by sample, by micro-batch, by rank. A mean may not. If ranks with unequal token counts average their own
means, the run minimizes another loss than one process does, and no loss curve shows it.

The weight enters twice: theta <- theta - lr * sum_i w_i grad_i, where grad_i is the gradient of rank i's loss sum
divided by sum_i w_i n_i. A weight that multiplies only the losses also changes the learning rate. The count is known
from the labels, so no forward is needed for it; the all-reduce has eight bytes.

Usual wrong answers:
* all-reduces a vector with a place for each micro-batch
* returns 1 instead of 0, so the optimizer steps on a gradient of zeros
* calls the package's function
* returns 3
* all-reduces a number per micro-batch
* sums over all ranks of the run instead of those of the group
* sums the count in float32, which cannot represent 2**24 + 1
* halves the count, on four ranks only
* a rank without tokens skips the all-reduce
* counts the last micro-batch only
* ignores the weight, on the third rank only
* every rank divides by its own token count
* divides the count by the number of ranks, so gradients are too large
* divides by this rank's tokens times the number of ranks: the mean of the ranks' means
* counts micro-batches instead of tokens
* returns a tensor without dimensions instead of a float
* multiplies the sum of all ranks by this rank's weight
* rounds the weight to float32
* leaves the weight out of the count: the learning rate changes with the weights
* rounds this rank's count to an integer
* returns 0
"""

from collections.abc import Sequence

import torch

from minidist.comm import Group, all_reduce


def count_tokens(num_tokens: Sequence[int], weight: float, group: Group) -> float:
    """Collective: return the weighted number of tokens of the global batch, by which every loss sum is divided.

    num_tokens: the tokens with a loss in each of this rank's micro-batches. weight: w_i, the factor with which the loss
    of this rank's data counts. group: the ranks that process different tokens.
    """
    count = torch.tensor([sum(num_tokens) * weight], dtype=torch.float64, device=group.world.control_device)
    all_reduce(count, group)
    return count.item()
