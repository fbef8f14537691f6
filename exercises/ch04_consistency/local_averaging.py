"""A round of local steps, and its drift.

Local SGD replaces an all-reduce per step by one per round: each replica takes several steps by itself, then all are
merged. Write such a round, and a function that measures how far the replicas have drifted apart before the merge.

local_step(parameters, step) changes the parameters in place. steps: the numbers of the round's steps, such as
range(8, 12). weight: this replica's, in the merge. rms_distance_from_mean returns sqrt(sum_i |theta_i - mean|^2 / n)
over the n replicas, where mean is the plain mean of all theta_i. Example: replicas [3, 0] and [5, 0] have the mean
[4, 0] and a drift of 1.

Checked: rounds of 1 to 4 steps on 1 to 3 ranks, compared with a loop over all replicas in one process; the numbers of
the steps, which may be a range with a stride; that nothing is sent before the last step; a replica of weight 0, with
and without steps to take; and the drift on all ranks, also of replicas that differ in their last digits only, in
float32 and float64. Measuring the drift must not change the parameters.

You may call:
    merge_replicas(parameters, weight, group)   overwrites the parameters of all ranks by their weighted mean
    all_reduce(tensor, group)   replaces the tensor by the sum over all ranks
    Tensor.double(), Tensor.square(), Tensor.sum(), Tensor.sqrt(), float(tensor)

Check it with: python -m exercises check local_averaging

Stub e53ee971.
"""

from torch import Tensor

from minidist.comm import Group, all_reduce
from minidist.consistency.simple import LocalStep, merge_replicas


def rms_distance_from_mean(parameters: Tensor, group: Group) -> float:
    """Collective: return the root mean square of the replicas' distances (Euclidean) from their unweighted mean.

    parameters: of this rank's replica, in one flat tensor, which is not changed. All ranks return the same number.
    """
    raise NotImplementedError("return the root mean square distance of the replicas from their mean")


def local_round(parameters: Tensor, local_step: LocalStep, steps: range, weight: float, group: Group) -> None:
    """Collective: call `local_step`, which does not communicate, for each step; then `merge_replicas` by `weight`."""
    raise NotImplementedError("take the local steps, then merge the replicas")
