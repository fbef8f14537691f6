"""All ranks update, or none.

Before the first parameter is written, all ranks must know that every rank has its gradients. Sum the gradients and this
agreement in one all-reduce, then update the parameters on all ranks or on none.

gradients: a list of tensors in the shapes of the model's parameters, all of one dtype, times the loss scale if there is
one. run: its model, optimizer and scaler are used; scaler may be None. Returns whether the ranks updated, a bool.
Example: on 2 ranks with gradients [[2.0]] and [[6.0]] of one parameter, loss scale 4 and SGD with learning rate 1, the
parameter falls by (2 + 6) / 4 = 2.0 on both, and both return True. If rank 1 passes is_usable=False, nothing changes on
either rank, the scaler is not updated, and both return False.

Checked: the parameters on 1 to 4 ranks, also with very large gradients; that no bit of parameters, optimizer states and
scaler changes if any one rank cannot update, for each rank in turn; that the scale of every rank falls after an
overflow; one all-reduce, of one element more than the gradients have, in float32, float64 and bfloat16; and that
nothing has changed if that all-reduce fails.

You may call:
    all_reduce(tensor, group)   replaces the tensor by the sum over all ranks; raises CommError if a rank is gone
    run.scaler.scale (a number), run.scaler.update(overflow: bool)
    run.optimizer.step(), run.optimizer.zero_grad(), run.model.parameters()
    torch.cat(tensors), Tensor.split(lengths), Tensor.isfinite(), Tensor.new_tensor(values)

Check it with: python -m exercises check agreed_update

Stub 1ad80c50.
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
    raise NotImplementedError("sum gradients and agreement in one all-reduce; update on all ranks or on none")
