"""A 1F1B step with its transfers: the solution, as it stands in minidist.parallel.pipeline.simple.

The first gradient reaches stage s after the micro-batch has passed through the later stages and its gradient has come
back. Until then stage s can run stages - 1 - s more forwards, and from then on it runs one backward per forward: at
most stages - s micro-batches are in flight, whatever the number of micro-batches in the step. With GPipe all of them
are in flight. The bubble is the same: 1F1B saves memory, not time.

With one warm-up forward fewer the stage waits for a gradient although it has work to do; with one more it keeps an
activation longer than needed. And the messages cross: a stage sends an activation while the next one sends a
gradient. A send may return only when its receive is posted, so both would wait for ever. One batch with both
directions, as in Megatron-LM, or sends that do not block, end the wait; the backend's buffers only hide it for short
messages.

Usual wrong answers:
* sends before it receives, on both sides: two neighbours wait for each other
* calls the package's function
* runs the first micro-batch only
* divides each gradient by the number of micro-batches
* expects at least as many micro-batches as stages
* the last stage runs the most warm-up forwards, before any activation has arrived
* runs all forwards first
* omits the backwards of the cool-down
* pairs an arriving gradient with the newest micro-batch instead of the oldest
* runs a backward after each forward from the start, on every stage
* sends tensors as they are, also if they are not contiguous
* one warm-up forward fewer, so the stage waits
* one warm-up forward more, so one more micro-batch is in flight
* keeps every graph until the end of the step
* returns before its last sends have completed
* does nothing
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
    stage, last_stage, live = group.rank, group.size - 1, {}

    def exchange(peer: int, outgoing: Tensor | None = None, incoming: int | None = None) -> Tensor | None:
        """Send `outgoing` to stage `peer` and receive the tensor of micro-batch `incoming` from it."""
        if not 0 <= peer < group.size:
            return None
        hidden = None if incoming is None else empty_hidden(incoming)
        transfers = [] if outgoing is None else [P2POp("send", outgoing.contiguous(), peer)]
        batch_send_recv(transfers + ([] if hidden is None else [P2POp("recv", hidden, peer)]), group)
        return hidden

    def forward(i: int, hidden: Tensor | None) -> Tensor:
        if hidden is not None:
            hidden.requires_grad_()
        live[i] = hidden, run_stage(i, hidden)
        return live[i][1].detach()

    def backward(i: int, grad: Tensor | None) -> Tensor | None:
        hidden, out = live.pop(i)
        out.backward(grad)
        return None if hidden is None else hidden.grad

    # The first gradient comes back when its micro-batch has passed all later stages.
    warm_up, steady = micro_batches[: last_stage - stage], micro_batches[last_stage - stage :]
    for i in warm_up:
        exchange(stage + 1, outgoing=forward(i, exchange(stage - 1, incoming=i)))
    hidden = exchange(stage - 1, incoming=steady[0]) if steady else None
    for number, i in enumerate(steady):
        done, following = micro_batches[number], steady[number + 1] if number + 1 < len(steady) else None
        grad = exchange(stage + 1, outgoing=forward(i, hidden), incoming=done)
        hidden = exchange(stage - 1, outgoing=backward(done, grad), incoming=following)
    for i in micro_batches[len(steady) :]:
        exchange(stage - 1, outgoing=backward(i, exchange(stage + 1, incoming=i)))
