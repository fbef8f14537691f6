"""How far replicas have drifted apart, and where local steps on quadratics end.

Replica i has the loss curvature_i / 2 * (theta - minimum_i)^2. A gradient step multiplies its distance from its own
minimum by 1 - lr * curvature_i. So after H steps from a common start the averaged replicas stay where they are at

    sum_i w_i r_i minimum_i / sum_i w_i r_i   with r_i = 1 - (1 - lr * curvature_i)^H,

which is the minimum of the weighted sum of all losses for H = 1, but not for H > 1 if the curvatures differ.
"""

from collections.abc import Sequence

from torch import Tensor

from minidist.comm import Group, all_reduce


def rms_distance_from_mean(parameters: Tensor, group: Group) -> float:
    """Collective: return the root mean square of the replicas' distances (Euclidean) from their unweighted mean.

    parameters: of this rank's replica, in one flat tensor, which is not changed. All ranks return the same number.
    """
    mean = parameters / group.size
    all_reduce(mean, group)
    total = (parameters - mean).double().square().sum()
    all_reduce(total, group)
    return float((total / group.size).sqrt())


def local_fixed_point(
    curvatures: Sequence[float], minima: Sequence[float], lr: float, num_steps: int, weights: Sequence[float] = ()
) -> float:
    """Return the parameter to which local SGD (`num_steps` steps, then a weighted mean) converges on quadratics.

    curvatures, minima: of each replica's quadratic loss. lr: the learning rate of the steps. weights: of each replica
    in the average; equal if empty.
    """
    reached = [1 - (1 - lr * curvature) ** num_steps for curvature in curvatures]
    shares = [w * r for w, r in zip(weights or [1.0] * len(reached), reached, strict=True)]
    return sum(share * minimum for share, minimum in zip(shares, minima, strict=True)) / sum(shares)
