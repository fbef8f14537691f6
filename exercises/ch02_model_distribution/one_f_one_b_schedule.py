"""A 1F1B step with its transfers.

Run each backward as early as possible: the step is as fast as GPipe's, but stage s of p has at most p - s micro-batches
in flight. Write the whole step: warm-up, steady state, cool-down, and messages that do not deadlock.

Arguments and results are those of gpipe_step. run_stage(i, hidden): (b_i, s, h) or None -> (b_i, s, h), on the last
stage the loss, (). empty_hidden(i): a new tensor (b_i, s, h). micro_batches: numbers, maybe fewer than stages or none.
Example: the actions of 3 stages and 4 micro-batches.
    stage 0   F0 F1 F2 B0 F3 B1 B2 B3
    stage 1   F0 F1 B0 F2 B1 F3 B2 B3
    stage 2   F0 B0 F1 B1 F2 B2 F3 B3

Checked, on 1 to 4 ranks: gradients against one process in float64, for 0 to 7 micro-batches of different sizes; the
order of actions by simulation: no deadlock, as fast as GPipe, at most min(p - s, micro-batches) in flight; one message
per micro-batch and neighbour, complete at the end; and that the tensors of a backward are freed before the next.

You may call:
    minidist.comm.send(tensor, peer, group), recv(tensor, peer, group)   block until the neighbour takes part, as in 2.6
    minidist.comm.send(tensor, peer, group, async_op=True), and recv   returns a handle at once; handle.wait() blocks
    batch_send_recv([P2POp("send", tensor, peer), P2POp("recv", other, peer)], group)   all of them at the same time
    Tensor.backward(grad), Tensor.detach(), Tensor.requires_grad_(), Tensor.contiguous(), group.rank, group.size

Check it with: python -m exercises check one_f_one_b_schedule

Stub 2899f5be.
"""

from collections.abc import Sequence

from torch import Tensor

from minidist.comm import Group, P2POp, batch_send_recv
from minidist.parallel.pipeline.simple import EmptyHidden, RunStage


def one_f_one_b_step(
    run_stage: RunStage, empty_hidden: EmptyHidden, micro_batches: Sequence[int], group: Group
) -> None:
    """Collective: as `gpipe_step`, but stage s of p has at most p - s micro-batches in flight.

    In the steady state, stage s sends an activation while stage s + 1 sends a gradient. Each sends and receives in one
    batch: if both sent first, each would wait until the other receives.
    """
    raise NotImplementedError("run the step: warm-up, steady state and cool-down, with their messages")
