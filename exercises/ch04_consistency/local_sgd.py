"""Local SGD: local steps, a weighted average, and drift.

Local SGD replaces an all-reduce per step by one per round: each replica takes several steps by itself, then all are
overwritten by their weighted mean. Write this merge, the round, and a function that measures how far the replicas have
drifted apart.

merge_replicas: `parameters` is this rank's replica, a vector or matrix of any floating-point dtype, and `weight` its
w_i, 0 or more, such as the number of tokens it has trained on. Example: on 3 ranks, parameters [1, 2], [9, 9], [4, -4]
with weights 1, 0 and 3 become [(1 + 3 * 4) / 4, (2 - 3 * 4) / 4] = [3.25, -2.5] on all three.

local_round: local_step(parameters, step) changes the parameters in place. steps: the numbers of the round's steps, such
as range(8, 12). weight: this replica's, in the merge.

rms_distance_from_mean returns a float, sqrt(sum_i |theta_i - mean|^2 / n) over the n replicas, where mean is their
unweighted mean. Example: replicas [3, 0] and [5, 0] have the mean [4, 0] and a drift of 1.

Checked: the merge. The mean on 1 to 4 ranks, to twelve digits in float64; that all ranks end with equal bits; a replica
of weight 0, which does not count even if its values are NaN or infinite, and gets the mean of the others; weights that
sum to 0, for which every rank raises ValueError and no parameter changes; token counts as weights of 16-bit
parameters, whose product with a weight would overflow; that the parameters are all-reduced once, in their dtype, and
only a few bytes are sent besides.
The round. One to four steps on 1 to 3 ranks, compared with a loop over all replicas in one process; the numbers of the
steps, which may be a range with a stride; that nothing is sent before the last step; a replica of weight 0, which takes
its steps like the others, or has none to take.
The drift. Its value on all ranks, also of replicas that differ in their last digits only, in float32 and float64, and
that measuring it does not change the parameters.

You may call:
    all_reduce(tensor, group)   replaces the tensor by the sum over all ranks; group.size is the number of ranks
    torch.tensor([number], dtype=torch.float64, device=group.world.control_device), Tensor.item()
    torch.zeros_like(tensor), Tensor.copy_(tensor)
    Tensor.double(), Tensor.square(), Tensor.sum(), Tensor.sqrt(), float(tensor)

Check it with: python -m exercises check local_sgd

Stub 71576c6f.
"""

import torch
from torch import Tensor

from minidist.comm import Group, all_reduce
from minidist.simple.consistency import LocalStep


def local_round(parameters: Tensor, local_step: LocalStep, steps: range, weight: float, group: Group) -> None:
    """Collective: call `local_step`, which does not communicate, for each step; then merge by `weight`."""
    raise NotImplementedError("take the local steps, then merge the replicas")


def rms_distance_from_mean(parameters: Tensor, group: Group) -> float:
    """Collective: return the root mean square of the replicas' distances (Euclidean) from their unweighted mean.

    parameters: of this rank's replica, in one flat tensor, which is not changed. All ranks return the same number.
    """
    raise NotImplementedError("return the root mean square distance of the replicas from their mean")


def merge_replicas(parameters: Tensor, weight: float, group: Group) -> None:
    """Collective: overwrite all ranks' parameters with sum_i w_i theta_i / sum_i w_i. weight: this rank's w_i >= 0.

    The weight may be the number of tokens that a replica has trained on. A replica of weight 0 does not count, even if
    its values are not finite. Raises ValueError on all ranks if the weights sum to 0.
    """
    raise NotImplementedError("overwrite the parameters of all ranks by their weighted mean")
