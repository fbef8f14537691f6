"""Skip a step on all ranks or on none: the solution, as it stands in minidist.precision.simple.

A rank must not decide alone from values that only this rank has. All-reduced gradients are equal on all ranks, and so
is an infinity in them; but gradient shards are not, and neither are the shards of a tensor-parallel or pipelined
model: there only one rank sees that its gradients overflowed. If only that rank skips the step, the replicas diverge
from then on, and if only that rank halves its scale, later gradient sums mix two scales.

The message comes before the first change, so a step whose message fails can be repeated: the ranks that are left
still have the parameters of the last step. A rank without an overflow takes part as well; a message that only the
unhappy rank sends is a deadlock. And the scaler learns of every step, because good steps are what makes the scale
grow again.

Usual wrong answers:
* one message per gradient
* the package's own
* always steps
* copies the masters before the optimizer's step
* divides by the scale of the next step
* divides the given gradients in place
* looks at the first element of each gradient
* looks at the first gradient only
* takes everything from fp16's largest number on for an overflow
* leaves the gradients on the masters
* a rank with an overflow halves its scale before the ranks agree
* the rank with the overflow sends nothing, and the others wait
* sends the flag, and then decides by its own gradients
* looks for infinities only
* forgets to divide by the scale
* the scaler never learns of good steps, so the scale never grows
* does not copy the masters to the parameters
* gathers Python objects
* the flag of rank 0 is sent to all
* all ranks skip, but only the one with the overflow halves its scale
* each rank decides by its own gradients
* tests the norm, whose square overflows for gradients that do not
* adds the elements up to test all at once, and takes a large sum for an overflow
* updates first, and would have to undo it
* never steps
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from minidist.comm import Group, all_reduce
from minidist.precision.simple import LossScaler, MasterWeights


def step_or_skip(
    masters: MasterWeights, gradients: Sequence[Tensor], optimizer: Optimizer, scaler: LossScaler, group: Group
) -> bool:
    """Collective: update masters and parameters on all ranks of `group`, or on none; return whether they were updated.

    gradients: of the masters, in order, times `scaler.scale`, summed over the ranks. Ranks may hold different masters,
    such as shards. optimizer: of the masters. One all-reduce of one fp32 number, the largest of the ranks' overflow
    flags, comes before any change; each rank's scaler then learns the result.
    """
    is_finite = all(gradient.isfinite().all() for gradient in gradients)
    overflow = torch.tensor(0.0 if is_finite else 1.0, device=group.world.control_device)
    all_reduce(overflow, group, "max")
    scale, skip = scaler.scale, bool(overflow)
    scaler.update(skip)
    if not skip:
        masters.attach_grads(gradients, scale)
        optimizer.step()
        optimizer.zero_grad()
        masters.copy_to_params()
    return not skip
