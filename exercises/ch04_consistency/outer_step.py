"""The outer step of DiLoCo.

DiLoCo does not simply replace the parameters by the mean of the replicas: it takes the averaged difference of a round
as a gradient for a step of SGD with Nesterov momentum. Write this outer optimizer.

parameters: a vector or matrix, equal on all ranks at the start; the inner steps change it in place, differently on each
rank. Let theta be the parameters after the last outer step, theta_i the present parameters of replica i, and
g = sum_i w_i (theta - theta_i) / sum_i w_i. The outer step is
    v <- momentum * v + g,    theta <- theta - lr * (g + momentum * v)
v is 0 at the start. After the step all replicas continue from theta. Keep theta and v in the attributes `start` and
`velocity`: tensors like the parameters from the beginning, the same objects or new ones after each step. A checkpoint
saves the present ones, and a load overwrites them in place. Write this step yourself: torch.optim.SGD is not allowed.
Example: theta = 10, lr 0.5, momentum 0.5. Two replicas of weight 1 reach 6 and 8, so g = 3, v = 3 and
theta = 10 - 0.5 * (3 + 1.5) = 7.75. If they then reach 7 and 6.5: g = 1, v = 2.5, theta = 6.625.

Checked: parameters and velocity in four rounds, compared with a loop over all replicas in one process, with unequal
weights; lr 1 and momentum 0, which is local SGD; the defaults; that start, velocity and parameters are equal on all
ranks and do not share memory; that a run goes on from a checkpoint's start and velocity; a replica of weight 0 that is
NaN; and that a round all-reduces the difference, or the parameters, once.

You may call:
    merge_replicas(tensor, weight, group)   overwrites any tensor on all ranks by its weighted mean
    Tensor.clone(), torch.zeros_like(tensor), Tensor.mul_(number), Tensor.add_(tensor), Tensor.copy_(tensor)

Check it with: python -m exercises check outer_step

Stub dffc240d.
"""

import torch
from torch import Tensor

from minidist.comm import Group
from minidist.simple.consistency import merge_replicas


class OuterStep:
    """DiLoCo's outer optimizer: SGD with Nesterov momentum on the averaged change of H inner steps.

    parameters: the first ones, equal on all ranks. lr, momentum: of the outer step; 1 and 0 give local SGD.
    """

    def __init__(self, parameters: Tensor, lr: float = 0.7, momentum: float = 0.9):
        raise NotImplementedError("note the parameters, a velocity of zeros, and the two numbers")

    def step(self, parameters: Tensor, weight: float, group: Group) -> None:
        """Collective: overwrite the `parameters` after the inner steps with the result of the outer step."""
        raise NotImplementedError("merge the differences, and make a Nesterov step with the mean")
