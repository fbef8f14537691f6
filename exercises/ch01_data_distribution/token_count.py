"""The token count of the global batch.

The loss of a step is sum_i w_i (loss sum of rank i) / sum_i w_i n_i, where n_i is the number of tokens of rank i that
have a label. Write the function that returns the denominator, which every rank needs before its first backward.

num_tokens: one integer per micro-batch of this rank; n_i is their sum. weight: w_i, the weight of this rank's data, a
number from 0 on. group: the ranks that process different tokens. Returns a float, equal on all ranks of the group and
with the precision of float64: whole numbers are exact, fractions may be rounded in any order of the additions.
Example: rank 0 has micro-batches with 3 and 1 tokens and weight 1, rank 1 has one with 2 tokens and weight 2. The
count is 1 * 4 + 2 * 2 = 8.0 on both. If rank 1's loss sum is 6, its part of the loss is 2 * 6 / 8 = 1.5.

Checked: loss and gradients of one process, if each rank divides its loss sums by your count: with unequal numbers of
tokens, with weights, with ranks without micro-batches or of weight 0; 0.0 if no token counts at all; counts above
2**24, which float32 cannot represent; that one number is all-reduced, once; a group of only some ranks.

You may call:
    torch.tensor([number], dtype=torch.float64, device=group.world.control_device)   a tensor of shape (1,)
    all_reduce(tensor, group)   sums `tensor` in place over the ranks of the group
    Tensor.item()   the number in a tensor with one element

Check it with: python -m exercises check token_count

Stub 3069e056.
"""

from collections.abc import Sequence

import torch

from minidist.comm import Group, all_reduce


def count_tokens(num_tokens: Sequence[int], weight: float, group: Group) -> float:
    """Collective: return the weighted number of tokens of the global batch, by which every loss sum is divided.

    num_tokens: the tokens with a loss in each of this rank's micro-batches. weight: w_i, the factor with which the loss
    of this rank's data counts. group: the ranks that process different tokens.
    """
    raise NotImplementedError("return the weighted number of tokens of all ranks")
