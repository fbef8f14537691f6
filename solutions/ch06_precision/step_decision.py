"""One decision for all ranks: step or skip: the solution, as it stands in minidist.simple.mixed_precision.

A rank must not decide alone from values that only this rank has. All-reduced gradients are equal on all ranks, and so
is an infinity in them; but gradient shards are not, and neither are the shards of a tensor-parallel or pipelined
model: there only one rank sees that its gradients overflowed. If only that rank skips the step, the replicas diverge
from then on, and if only that rank halves its scale, later gradient sums mix two scales.

The all-reduce comes before the first change, so a step whose all-reduce fails can be repeated: the ranks that are
left still have the parameters of the last step. A rank without an overflow takes part as well; a message that only
the unhappy rank sends is a deadlock. The same message carries the norm for clipping and the request to stop, which
all ranks must follow in the same step. And the scaler learns of every step, because good steps are what makes the
scale grow again.

Usual wrong answers:
* one all-reduce for each of the three numbers
* stops only if all ranks were asked
* halves the scale for a loss that is not finite, again and again, until the scale is 0
* counts a step with a loss that is not finite as a good one
* the package's own
* always the same decision
* each rank decides by its own norm
* reports a loss of 0 without tokens
* the scaler counts steps without tokens
* without tokens no step counts as an overflow, although only `loss` and `update_successful` have other rules there
* returns without a message if there are no tokens, and requests to stop are lost
* updates without tokens, which decays the weights
* goes on with its own numbers when the message fails
* fills the decision with tensors instead of numbers
* sends the number of tokens and the scale as well, which all ranks know
* sums flags that tell whether each part is finite: two finite parts may have an infinite sum
* a rank with an overflow halves its scale before the ranks agree, which nobody undoes if the message fails
* sends float32, which rounds losses and overflows at norms that are finite
* looks for NaN only
* takes everything beyond float32 for an overflow
* the rank with the overflow sends nothing, and the others wait
* looks at the norm only
* a loss of exactly 0, with tokens, is None
* averages the parts of the loss, which are parts of a mean already
* looks for infinities only
* returns an infinite norm instead of NaN
* forgets the square root
* the scaler never learns of good steps, so the scale never grows
* reports an overflow where nothing was scaled
* returns this rank's part of the loss
* returns the norm of this rank's part, by which each rank would clip differently
* gathers Python objects
* all ranks skip, but only the one with the overflow halves its scale
* the scaler never learns of a step
* only the rank that was asked to stop stops, and the others wait for it
* adds the ranks' norms instead of their squares
* sees the overflow and updates
* takes less than one weighted token for none
* a decision of zeros
"""

import math

import torch

from minidist.comm import Group, all_reduce
from minidist.simple.mixed_precision import Decision, LossScaler


def agree_on_step(
    loss: float, squared_norm: float, stop_requested: bool, num_tokens: float, scaler: LossScaler | None, group: Group
) -> Decision:
    """Collective: make one decision for all ranks, before the first of them has written a parameter.

    loss, squared_norm: this rank's parts of the global batch's loss and of the squared gradient norm. stop_requested:
    whether this rank asks to end the run. num_tokens: in the global batch; 0 skips the step. group: all ranks.
    """
    vector = torch.tensor([loss, squared_norm, stop_requested], dtype=torch.float64, device=group.world.control_device)
    all_reduce(vector, group)
    total, square, stops = vector.tolist()
    is_finite = math.isfinite(total) and math.isfinite(square)
    decision = Decision(
        loss=total if num_tokens else None,
        num_tokens=num_tokens,
        grad_norm=math.sqrt(square) if is_finite else math.nan,
        update_successful=is_finite and num_tokens > 0,
        is_finite=is_finite,
        overflowed=scaler is not None and math.isfinite(total) and not is_finite,
        stop_requested=stops > 0,
    )
    if scaler is not None and num_tokens > 0 and math.isfinite(total):
        scaler.update(decision.overflowed)  # a smaller scale cannot mend a loss that is not finite
    return decision
