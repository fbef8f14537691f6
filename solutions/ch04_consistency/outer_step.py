"""The outer step of DiLoCo: the solution, as it stands in minidist.simple.consistency.

The mean of the replicas is start - g, so lr 1 without momentum is local SGD. The momentum adds up what successive
rounds have in common, as it does for the gradients of single steps, while the part of g in which the rounds disagree
cancels. lr 0.7 and momentum 0.9 are the paper's settings (Douillard et al. 2023), with AdamW as inner optimizer.

`start` is where all replicas were equal, and it must not change during the inner steps: a clone, not the same memory.
Start and velocity follow from the merged difference only, so all ranks compute the same values, and neither of them
is ever sent. They are states of the run: a checkpoint needs them.

Usual wrong answers:
* averages the parameters: local SGD without an outer optimizer
* the package's own
* returns to the parameters of the start after every round
* the velocity as a moving average, with 1 - momentum before the gradient
* ignores the weights of the replicas
* makes the outer step from each replica's own parameters, and not from the common start
* plain momentum: steps by the velocity, without Nesterov's look-ahead
* another default momentum
* uses the velocity of the round before
* uses this replica's own difference: nothing is merged
* merges the parameters at the end, although they are equal: twice the bytes
* does not write the result to the parameters: each replica goes on from its own
* takes the rate 0 for a rate that was not given
* multiplies by lr when the velocity is updated, and again in the step
* a replica of weight 0 skips the outer step, in which the others wait for it
* keeps the parameters themselves as the start: the inner steps change it, and every difference is 0
* takes parameters - start for the gradient, and moves away from where the replicas went
* measures every round's difference from the start of the run
* works with a velocity of its own, of which the attribute is a copy: what a checkpoint writes there is lost
* overwrites the tensor that it was constructed with, and not the one that the step gets
* the velocity has float32, whatever the dtype of the parameters
* begins with the parameters as velocity
* merges the velocities as well, which are equal on all ranks anyway
* adds lr times g to the velocity, and does not multiply it in the step: right parameters, another velocity saved
* does nothing after a round
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
        self.start, self.velocity = parameters.clone(), torch.zeros_like(parameters)
        self.lr, self.momentum = lr, momentum

    def step(self, parameters: Tensor, weight: float, group: Group) -> None:
        """Collective: overwrite the `parameters` after the inner steps with the result of the outer step."""
        outer_gradient = self.start - parameters
        merge_replicas(outer_gradient, weight, group)
        self.velocity.mul_(self.momentum).add_(outer_gradient)
        self.start -= self.lr * (outer_gradient + self.momentum * self.velocity)
        parameters.copy_(self.start)
