"""All ranks update, or none: the solution, as it stands in minidist.fault.simple.agreement.

An update that only some ranks make cannot be undone: from then on the replicas are different models. So each rank
decides from sums only, which are equal on all ranks. The all-reduce of the gradients is needed anyway; one more
element carries the agreement, so it costs no message. A non-finite gradient makes every sum non-finite and needs no
flag.

Everything before the all-reduce can be repeated, because nothing has been written; if a rank dies, the others get an
error there and still have the parameters of the last step. That is what makes recovery without a checkpoint possible.
The flag is not a gradient of zero: a rank without its part of the batch would let the others update with a gradient
of fewer samples, and no loss curve shows it.

Usual wrong answers:
* the package's own
* always updates
* goes on after an error with what the broken sum left behind
* tests the total of all elements, which overflows for large gradients that are finite
* leaves the gradients in .grad, to which the next backward would add
* sums in float32, whatever the dtype of the gradients is
* averages over the ranks what is already divided by the size of the global batch
* an unusable rank sends NaN and no flag: the others take it for an overflow
* takes an overflow for a rank without gradients: the scaler never learns of it
* each rank decides by its own flag
* each rank tests its own gradients for infinities
* lowers the scale before the all-reduce if its own gradients have overflowed: after an error the ranks have different
  scales
* returns whether the gradients were usable, and not whether the ranks updated
* does not divide by the loss scale
* the scaler learns of good steps only
* divides by the scale after the scaler has changed it
* the scaler learns of the step before all ranks have agreed
* the scaler learns of steps in which a rank had no gradients
* a message of its own for the flag
* an unusable rank sends zeros, and the others update without its part of the batch
* updates with gradients of zero
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minidist.comm import Group, all_reduce
from minidist.fault.simple.run import Run


def agreed_update(run: Run, gradients: Sequence[Tensor], is_usable: bool, group: Group) -> bool:
    """Collective: sum the gradients over the ranks, then update the parameters on all ranks or on none.

    gradients: one per parameter, in the order of the model: this rank's part of the gradient of the global batch, times
    the loss scale. is_usable: False if this rank could not compute them; their values then do not matter.
    No rank updates if `is_usable` is False on any of them, or any element of the sum is non-finite. If the gradients of
    all ranks were usable, the scaler learns whether they overflowed. One all-reduce, in the gradients' dtype, decides
    all. Returns whether the ranks updated. Raises CommError if a rank is gone; then nothing of `run` has changed.
    """
    flat = torch.cat([*(gradient.flatten() for gradient in gradients), gradients[0].new_tensor([not is_usable])])
    all_reduce(flat, group)
    usable, finite = flat[-1].item() == 0, bool(flat.isfinite().all())
    scale = 1.0 if run.scaler is None else run.scaler.scale
    if run.scaler is not None and usable:
        run.scaler.update(not finite)
    if usable and finite:
        sums = (flat[:-1] / scale).split([gradient.numel() for gradient in gradients])
        for parameter, total in zip(run.model.parameters(), sums, strict=True):
            parameter.grad = total.view_as(parameter)
        run.optimizer.step()
        run.optimizer.zero_grad()
    return usable and finite
