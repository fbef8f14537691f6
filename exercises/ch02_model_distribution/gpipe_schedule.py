"""A GPipe step with its transfers.

The model is split into stages, one per rank, and the batch into micro-batches. Write a whole training step of this
rank's stage: forwards, backwards, and the messages between neighbours. It adds the gradients of all micro-batches to
`.grad` and returns nothing.

run_stage(i, hidden) runs the stage on micro-batch i: hidden is the previous stage's output (b_i, s, h), None on stage
0. It returns the stage's output (b_i, s, h), on the last stage the micro-batch's part of the loss, (). empty_hidden(i)
returns a new tensor (b_i, s, h). micro_batches: a list of numbers, equal on all stages. group.rank is the stage.
Example: 2 stages with the weights w0 = 2 and w1 = 3, two micro-batches of one number: x = 1 and x = 10. Stage 0 returns
    w0 * x, stage 1 returns w1 * hidden as the loss. Stage 0 runs F0 F1 B0 B1: it sends 2.0 and 20.0 and receives 3.0
    twice. In the end w0.grad = 3 * 1 + 3 * 10 = 33 and w1.grad = 2 + 20 = 22

Checked, on 1 to 4 ranks: gradients against one process in float64, with micro-batches of different sizes and a second
step that accumulates; that all forwards precede all backwards; one message per micro-batch and neighbour, in the dtype
of the hidden states, complete at the end; and that the tensors of a backward are freed before the next.

You may call:
    send(tensor, peer, group)   blocks until stage `peer` receives the tensor, which must be contiguous
    recv(tensor, peer, group)   overwrites the tensor with the one that stage `peer` sends
    receive(i, peer, empty_hidden, group)   empty_hidden(i) after recv from `peer`; None if there is no such stage
    Tensor.backward(grad), Tensor.detach(), Tensor.requires_grad_(), Tensor.contiguous(), group.rank, group.size

Check it with: python -m exercises check gpipe_schedule

Stub e7a73891.
"""

from collections.abc import Sequence

from minidist.comm import Group, send
from minidist.parallel.pipeline.simple import EmptyHidden, RunStage, receive


def gpipe_step(run_stage: RunStage, empty_hidden: EmptyHidden, micro_batches: Sequence[int], group: Group) -> None:
    """Collective: run forward of all micro-batches, then backward of all; gradients of parameters go to `.grad`.

    micro_batches: their numbers, in order, the same on all stages. group: the stages, in order.
    """
    raise NotImplementedError("run all forwards, then all backwards, with their messages")
