"""A round of local steps, and its drift: the solution, as it stands in minidist.tools.consistency.drift and
minidist.consistency.simple.

A round of H steps sends as many bytes as one synchronous step, so the bytes fall by the factor H. In between each
replica follows its own gradients, and the replicas drift: after one step of plain SGD the mean of the replicas is the
synchronous result, but the second step already uses gradients at different parameters.

The drift is measured before the merge: afterwards it is 0. The difference is squared, and not the difference of
squares computed: replicas that agree in six digits would lose all of them in mean(x^2) - mean(x)^2.

Usual wrong answers:
* a replica without steps skips the merge, in which the others wait for it
* the package's own
* the same parameters after every round
* subtracts the square of the mean from the mean of the squares: the digits cancel
* subtracts the square of the mean from the mean of the squares, in float64: the digits of float64 cancel as well
* measures the distances from rank 0's replica
* compares with the sum of the replicas instead of their mean
* merges with weight 1 on all ranks
* merges after every step: as many bytes as synchronous training
* merges at the beginning of the round: the replicas differ at its end, and so does the saved model
* all-reduces the parameters themselves, and so merges the replicas
* never merges the replicas
* takes the first step of the next round as well
* takes the steps on a copy, and merges what has not moved
* returns this rank's distance: the ranks disagree, and rank 0 logs its own
* divides by the number of elements as well
* a replica of weight 0 takes no steps, and so does not read the data that it must skip
* returns the mean square, without the root
* sums the squares in float32: small differences vanish beside large ones
* numbers the steps of every round from 0: the same batches in each round
* takes every number between the first and the last step, also if the range has a stride
* does not divide by the number of replicas
* multiplies the weight, which counts samples already, by the rank's number of steps
* zeros on all ranks
"""

from torch import Tensor

from minidist.comm import Group, all_reduce
from minidist.consistency.simple import LocalStep, merge_replicas


def rms_distance_from_mean(parameters: Tensor, group: Group) -> float:
    """Collective: return the root mean square of the replicas' distances (Euclidean) from their unweighted mean.

    parameters: of this rank's replica, in one flat tensor, which is not changed. All ranks return the same number.
    """
    mean = parameters / group.size
    all_reduce(mean, group)
    total = (parameters - mean).double().square().sum()
    all_reduce(total, group)
    return float((total / group.size).sqrt())


def local_round(parameters: Tensor, local_step: LocalStep, steps: range, weight: float, group: Group) -> None:
    """Collective: call `local_step`, which does not communicate, for each step; then `merge_replicas` by `weight`."""
    for step in steps:
        local_step(parameters, step)
    merge_replicas(parameters, weight, group)
