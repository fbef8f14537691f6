"""Skip a step on all ranks or on none.

Each rank has other master weights, and sees overflows in its own gradients only. Write the step of mixed precision that
all ranks make, or none: they agree before the first parameter is written.

gradients: one tensor per master, in the masters' shapes, in any floating-point dtype. scaler: its `scale` multiplied
the loss of this step. Returns a bool, equal on all ranks.
Example: on 2 ranks with SGD, learning rate 1 and loss scale 4, rank 0 has the gradient 8.0 and rank 1 has 2.0.
    The master of rank 0 falls by 2.0, that of rank 1 by 0.5, and both ranks return True.
    If rank 1 has inf instead, nothing changes on either rank, both scales become 2, and both ranks return False.

Checked: masters, parameters and optimizer states on 1 to 4 ranks, in bit-for-bit equality after a skipped step, for
each rank in turn and for inf and NaN; the scales of all ranks after good steps and overflows; one all-reduce of one
fp32 number per step; that nothing has been written before it, and nothing has changed if it fails; and that no gradient
is left on a master or changed in place.

You may call:
    all_reduce(tensor, group, "max")   replaces each element by the largest of all ranks; CommError if a rank is gone
    masters.attach_grads(gradients, scale), masters.copy_to_params()   as in exercise 6.2
    optimizer.step(), optimizer.zero_grad(), scaler.scale, scaler.update(overflow: bool)
    torch.tensor(number, device=group.world.control_device), Tensor.isfinite(), Tensor.all()

Check it with: python -m exercises check agreed_overflow

Stub 225fd741.
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
    raise NotImplementedError("agree on an overflow, then step on all ranks or on none")
