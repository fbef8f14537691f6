"""The weighted merge of uneven replicas: the solution, as it stands in minidist.consistency.simple.

A mean over replicas weighs each replica by what it has learned from. If one has seen ten times as many tokens as
another, the plain mean gives a sample of the latter ten times the influence. All ranks know the sum of weights, so
all of them raise the error: if one rank raised it alone, the others would wait for ever in the next all-reduce.

A replica of weight 0 may be one whose values are of no use, such as a rank that has just joined, or one that has
overflowed. Zero times NaN is NaN, so it must send zeros. Token counts exceed what 16 bits, and even 24, can count, so
the weights are summed in float64. The parameters are multiplied by weight / sum, which is at most 1: the product of a
token count and a parameter would overflow in float16, whose largest number is 65504.

Usual wrong answers:
* a replica of weight 0 does not take part in the all-reduce, in which the others wait for it
* the package's own
* the same parameters after every merge
* divides by its own weight: the ranks differ afterwards
* divides by the number of ranks instead of the sum of the weights
* raises if its own weight is 0, although the others have weights
* raises the error after it has overwritten the parameters
* gathers the parameters of all ranks, each of which computes the mean: n times the memory and more bytes
* sends the parameters in float64, twice the bytes
* multiplies the parameters in place, before it knows whether there is a mean
* keeps its own parameters if its weight is 0, and is not merged
* raises nothing: the parameters of all ranks become zeros
* takes the weighted sum for the mean
* ignores the weights, which is right only if all replicas have trained on equally much
* sums weight * parameters and divides the sum: in float16 the product overflows if the weight is a token count
* returns the mean, and leaves the parameters as they are
* sends its weight in the dtype of the parameters, to save a message
* sums the weights in float32
* zeros on all ranks
* multiplies by 0, which leaves NaN and infinity as NaN
"""

import torch
from torch import Tensor

from minidist.comm import Group, all_reduce


def merge_replicas(parameters: Tensor, weight: float, group: Group) -> None:
    """Collective: overwrite all ranks' parameters with sum_i w_i theta_i / sum_i w_i. weight: this rank's w_i >= 0.

    The weight may be the number of tokens that a replica has trained on. A replica of weight 0 does not count, even if
    its values are not finite. Raises ValueError on all ranks if the weights sum to 0.
    """
    weights = torch.tensor([weight], dtype=torch.float64, device=parameters.device)
    all_reduce(weights, group)
    if weights.item() == 0:
        raise ValueError("the weights of all replicas sum to 0: give one of them a weight above 0")
    # weight * parameters, summed and then divided, would overflow in float16 if the weights are token counts.
    mean = parameters * (weight / weights.item()) if weight else torch.zeros_like(parameters)
    all_reduce(mean, group)
    parameters.copy_(mean)
