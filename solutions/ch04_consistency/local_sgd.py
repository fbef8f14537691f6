"""Local SGD: local steps, a weighted average, and drift: the solution, as it stands in minidist.simple.consistency and
minidist.tools.consistency.drift.

A round of H steps sends as many bytes as one synchronous step, so the bytes fall by the factor H. In between each
replica follows its own gradients, and the replicas drift: after one step of plain SGD the mean of the replicas is the
synchronous result, but the second step already uses gradients at different parameters.

A mean over replicas weighs each replica by what it has learned from. If one has seen ten times as many tokens as
another, the plain mean gives a sample of the latter ten times the influence. All ranks know the sum of weights, so
all of them raise the error: if one rank raised it alone, the others would wait for ever in the next all-reduce.

A replica of weight 0 may be one whose values are of no use, such as a rank that has just joined, or one that has
overflowed. Zero times NaN is NaN, so it must send zeros. Token counts exceed what 16 bits, and even 24, can count, so
the weights are summed in float64. The parameters are multiplied by weight / sum, which is at most 1: the product of a
token count and a parameter would overflow in float16, whose largest number is 65504.

The drift is measured before the merge: afterwards it is 0. The difference is squared, and not the difference of
squares computed: replicas that agree in six digits would lose all of them in mean(x^2) - mean(x)^2.

Usual wrong answers:
* a replica of weight 0 does not take part in the all-reduce, in which the others wait for it
* a replica without steps skips the merge, in which the others wait for it
* the package's own
* the same parameters after every merge
* subtracts the square of the mean from the mean of the squares: the digits cancel
* subtracts the square of the mean from the mean of the squares, in float64: the digits of float64 cancel as well
* measures the distances from rank 0's replica
* divides by its own weight: the ranks differ afterwards
* divides by the number of ranks instead of the sum of the weights
* compares with the sum of the replicas instead of their mean
* merges with weight 1 on all ranks
* raises if its own weight is 0, although the others have weights
* raises the error after it has overwritten the parameters
* gathers the parameters of all ranks, each of which computes the mean: n times the memory and more bytes
* sends the parameters in float64, twice the bytes
* merges after every step: as many bytes as synchronous training
* merges at the beginning of the round: the replicas differ at its end, and so does the saved model
* all-reduces the parameters themselves, and so merges the replicas
* multiplies the parameters in place, before it knows whether there is a mean
* keeps its own parameters if its weight is 0, and is not merged
* raises nothing: the parameters of all ranks become zeros
* takes the weighted sum for the mean
* never merges the replicas
* takes the first step of the next round as well
* takes the steps on a copy, and merges what has not moved
* returns this rank's distance: the ranks disagree, and rank 0 logs its own
* divides by the number of elements as well
* ignores the weights, which is right only if all replicas have trained on equally much
* sums weight * parameters and divides the sum: in float16 the product overflows if the weight is a token count
* a replica of weight 0 takes no steps, and so does not read the data that it must skip
* returns the mean, and leaves the parameters as they are
* takes a small sum of the weights for 0
* returns the mean square, without the root
* sums the squares in float32: small differences vanish beside large ones
* numbers the steps of every round from 0: the same batches in each round
* takes the steps of a range that counts down in ascending order
* takes every number between the first and the last step, also if the range has a stride
* does not divide by the number of replicas
* sends its weight in the dtype of the parameters, to save a message
* multiplies the weight, which counts samples already, by the rank's number of steps
* sums the weights in float32
* zeros on all ranks
* multiplies by 0, which leaves NaN and infinity as NaN
"""

import torch
from torch import Tensor

from minidist.comm import Group, all_reduce
from minidist.simple.consistency import LocalStep


def local_round(parameters: Tensor, local_step: LocalStep, steps: range, weight: float, group: Group) -> None:
    """Collective: call `local_step`, which does not communicate, for each step; then merge by `weight`."""
    for step in steps:
        local_step(parameters, step)
    merge_replicas(parameters, weight, group)


def rms_distance_from_mean(parameters: Tensor, group: Group) -> float:
    """Collective: return the root mean square of the replicas' distances (Euclidean) from their unweighted mean.

    parameters: of this rank's replica, in one flat tensor, which is not changed. All ranks return the same number.
    """
    mean = parameters / group.size
    all_reduce(mean, group)
    total = (parameters - mean).double().square().sum()
    all_reduce(total, group)
    return float((total / group.size).sqrt())


def merge_replicas(parameters: Tensor, weight: float, group: Group) -> None:
    """Collective: overwrite all ranks' parameters with sum_i w_i theta_i / sum_i w_i. weight: this rank's w_i >= 0.

    The weight may be the number of tokens that a replica has trained on. A replica of weight 0 does not count, even if
    its values are not finite. Raises ValueError on all ranks if the weights sum to 0.
    """
    total_weight = torch.tensor([weight], dtype=torch.float64, device=group.world.control_device)
    all_reduce(total_weight, group)
    if total_weight.item() == 0:
        raise ValueError("the weights of all replicas sum to 0: give one of them a weight above 0")
    # Divided before the sum: a sum of w_i * theta_i would overflow in float16 if w_i counts tokens.
    average = parameters * (weight / total_weight.item()) if weight else torch.zeros_like(parameters)
    all_reduce(average, group)
    parameters.copy_(average)
