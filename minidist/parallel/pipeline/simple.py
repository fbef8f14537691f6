"""Pipeline parallelism in one file: GPipe and 1F1B, one chunk per stage, no split backward, no tensor parallelism.

A stage receives activations from the stage before it and sends its own to the next; gradients go the other way. Both
steps give equal gradients. GPipe (Huang et al. 2019) runs all forwards, then all backwards. 1F1B (Narayanan et al.
2021) runs each backward as early as possible: fewer micro-batches are in flight. The fast one is `executor`.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from minidist.comm import Group, P2POp, batch_send_recv, recv, send
from minidist.parallel.data.reducer import GradientReducer, trainable_parameters
from minidist.parallel.pipeline.actions import Schedule

# Runs this stage's layers: (micro-batch, output of the previous stage or None) -> the stage's output; that of the last
# stage is the micro-batch's contribution to the loss.
RunStage = Callable[[int, Tensor | None], Tensor]
# Returns a new tensor for the hidden states of a micro-batch, by its number.
EmptyHidden = Callable[[int], Tensor]
# `RunStage` for one of several chunks of a stage, whose number comes first.
RunPart = Callable[[int, int, Tensor | None], Tensor]


def receive(i: int, peer: int, empty_hidden: EmptyHidden, group: Group) -> Tensor | None:
    """Receive the hidden states of micro-batch `i`, or their gradient, from stage `peer`; None if there is none."""
    if not 0 <= peer < group.size:
        return None
    hidden = empty_hidden(i)
    recv(hidden, peer, group)
    return hidden


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


class SimplePipelineExecutor:
    """Runs this rank's stage of a "gpipe" or "1f1b" schedule; arguments and attributes as in `PipelineExecutor`.

    All gradients are complete, and may be reduced, when the stage has done its last backward.
    """

    def __init__(
        self,
        schedule: Schedule,
        groups: tuple[Group, Group],
        reducer: GradientReducer,
        parameters: Mapping[str, Tensor],
        used_by: Mapping[str, Sequence[int]],
        shared: Sequence[str] = (),
    ):
        self.schedule, self.stage, self.reducer, self._group = schedule, groups[0].rank, reducer, groups[0]
        self._complete = [name for name in trainable_parameters(parameters) if used_by[name] and name not in shared]
        self.last_part_stage, self.peak_live = schedule.num_stages - 1, 0

    def is_last_backward(self, name: str) -> bool:
        """Return False: `run` marks every parameter as ready itself."""
        return False

    def weight_gradient_inputs(self) -> list[Tensor]:
        """Return no tensors: backward is not split."""
        return []

    def run(self, run_part: RunPart, empty_hidden: EmptyHidden, skip: Sequence[int] = ()) -> None:
        """Collective over the stages: run forward and backward of all micro-batches, except those in `skip`."""
        live = set[int]()

        def run_stage(i: int, hidden: Tensor | None) -> Tensor:
            out = run_part(0, i, hidden)
            live.add(i)
            self.peak_live = max(self.peak_live, len(live))
            out.register_hook(lambda _: live.discard(i))  # backward begins
            return out

        micro_batches = [i for i in range(self.schedule.micro_batches) if i not in skip]
        run_step = {"gpipe": gpipe_step, "1f1b": one_f_one_b_step}[self.schedule.kind]
        run_step(run_stage, empty_hidden, micro_batches, self._group)
        for name in self._complete:
            self.reducer.mark_ready(name)

    @torch.no_grad()
    def run_forward(self, run_part: RunPart, empty_hidden: EmptyHidden, micro_batches: int) -> None:
        """Collective over the stages: run forward of `micro_batches` non-empty micro-batches, one after another."""
        for i in range(micro_batches):
            out = run_part(0, i, receive(i, self.stage - 1, empty_hidden, self._group))
            if self.stage < self.last_part_stage:
                send(out.contiguous(), self.stage + 1, self._group)
