"""A GPipe step with its transfers: the solution, as it stands in minidist.parallel.pipeline.simple.

A stage is idle until the first micro-batch reaches it, and idle again after its last backward: the bubble is stages -
1 forwards and as many backwards, whatever the number of micro-batches. More micro-batches make the bubble a smaller
fraction of the step. But all of them are in flight when the first backward begins, so more micro-batches need more
activation memory.

Autograd ends at the process boundary. A received tensor is a new leaf of this rank's graph, and its `.grad` is what
the previous stage needs to go on. The two halves of the chain rule meet in `backward(gradient)`: the received
gradient stands for everything after this stage. What is sent is detached, because a graph cannot be sent.

Usual wrong answers:
* the last stage returns gradients in an order that differs from that of the other stages
* calls the package's function
* runs the first micro-batch only
* divides the loss by the number of micro-batches, which its part of the mean does not need
* sends float32 whatever the dtype of the hidden states
* sends the output as it is, also if it is not contiguous
* runs micro-batches 0, 1, 2, ... instead of the given numbers
* receives every micro-batch into one tensor, which later ones overwrite
* runs forward and backward of each micro-batch before the next: one stage works at a time
* starts every stage's backward from ones instead of the received gradient
* keeps every graph until the end of the step
* does not wait for its last sends
* passes the gradient of its output on to the previous stage instead of that of its input
* sends the number of samples before each activation
* does nothing
"""

from collections.abc import Sequence

from minidist.comm import Group, send
from minidist.parallel.pipeline.simple import EmptyHidden, RunStage, receive


def gpipe_step(run_stage: RunStage, empty_hidden: EmptyHidden, micro_batches: Sequence[int], group: Group) -> None:
    """Collective: run forward of all micro-batches, then backward of all; gradients of parameters go to `.grad`.

    micro_batches: their numbers, in order, the same on all stages. group: the stages, in order.
    """
    stage, last_stage, live = group.rank, group.size - 1, {}
    for i in micro_batches:
        hidden = receive(i, stage - 1, empty_hidden, group)
        if hidden is not None:
            hidden.requires_grad_()
        out = run_stage(i, hidden)
        if stage < last_stage:
            send(out.detach().contiguous(), stage + 1, group)
        live[i] = hidden, out
    for i in micro_batches:
        hidden, out = live.pop(i)
        out.backward(receive(i, stage + 1, empty_hidden, group))
        if stage > 0:
            send(hidden.grad.contiguous(), stage - 1, group)
