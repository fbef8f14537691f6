"""One stage of a pipeline at work: it runs its program, whatever the schedule.

The program is data (`transfers.with_transfers`): operations, and between them the sends and receives in the one order
in which all stages have them. A receive is started where the program has it and waited for where its tensor is needed,
so that it arrives while the stage computes.

Backward is split into B, the input gradient, and W, the weight gradient, only in schedules that separate the two (zero
bubble). All others run autograd's own backward, which is faster.

What a backward computes goes to the reducer; the executor says when nothing more will come for a parameter. One that
other stages share is left to the end of the step: its reduction must not get between transfers that are still to come.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from minidist.comm import Group, Handle, recv, send
from minidist.parallel.data.reducer import GradientReducer, trainable
from minidist.parallel.pipeline.action_times import unit_times
from minidist.parallel.pipeline.actions import Op, Schedule, StageOp, last_backward_index
from minidist.parallel.pipeline.split_backward import DeferredWeightGradient, DeferWeightGradients, weight_gradient
from minidist.parallel.pipeline.transfers import StageProgram, Transfer, check_rendezvous, insert_transfers

# Runs one part of the model: (chunk, micro-batch, what the part before gave or None) -> what the part after needs, or,
# of the last part, this micro-batch's share of the loss.
Part = Callable[[int, int, Tensor | None], Tensor]


class PipelineExecutor:
    """Runs one stage of `schedule`.

    groups: over the stages, one for what forwards pass on and one for what backwards do. reducer: where gradients go.
    parameters: of this stage, by global name. used_by: the chunks that use each of them (`split`); shared: names of
    those that other stages use too. end: called when a backward through a chunk is over.
    end_stage: the stage that has the last part of the model. peak_live: the peak number of micro-batches in flight,
    each chunk counted by itself.
    """

    def __init__(
        self,
        schedule: Schedule,
        groups: tuple[Group, Group],
        reducer: GradientReducer,
        parameters: Mapping[str, Tensor],
        used_by: Mapping[str, Sequence[int]],
        shared: Sequence[str] = (),
        end: Callable[[int], None] = lambda chunk: None,
    ):
        self.schedule, self.stage, self.reducer = schedule, groups[0].rank, reducer
        self._end = end
        self._groups = dict(zip("FB", groups, strict=True))
        self._meter = groups[0].meter
        programs = insert_transfers(unit_times(schedule))
        check_rendezvous(schedule, programs)
        self._program: StageProgram = programs[self.stage]
        trained = trainable(parameters)
        self._names = {parameter: name for name, parameter in trained.items()}
        ends = last_backward_index(schedule, self.stage)
        self._complete: dict[Op, list[str]] = {}
        for name, chunks in used_by.items():
            if name not in shared and chunks and name in trained:
                op = schedule.orders[self.stage][max(ends[chunk] for chunk in chunks)]
                self._complete.setdefault(op, []).append(name)
        self.end_stage = schedule.owner(schedule.positions - 1)[0]
        self.peak_live = 0
        self._begin()

    def _begin(self) -> None:
        self._arrived: dict[StageOp, tuple[Tensor, Handle | None]] = {}  # results of other parts
        self._alive: dict[Op, tuple[Tensor | None, GradientEdge]] = {}  # of each F: its input, and its graph
        self._halves: dict[Op, list[DeferredWeightGradient]] = {}  # of each F: the weight halves its backward leaves
        self._sends: deque[Handle] = deque()
        self._op: Op | None = None

    # -- the reducer's side -------------------------------------------------------------------------------------------

    def add(self, name: str, grad: Tensor) -> None:
        """A gradient that autograd completed in the backward that runs now."""
        self.reducer.add(name, grad)

    def ready(self, name: str) -> None:
        """Autograd has no more for this backward; whether that was the parameter's last one, the schedule knows."""
        if name in self._complete.get(self._op, ()):
            self.reducer.ready(name)

    def weight_gradient_inputs(self) -> list[Tensor]:
        """The tensors kept from B for the weight gradients that W still has to compute."""
        return [tensor for halves in self._halves.values() for _, *pair in halves for tensor in pair]

    # -- the program --------------------------------------------------------------------------------------------------

    def run(self, part: Part, empty: Callable[[int], Tensor], skip: Sequence[int] = ()) -> None:
        """Forward and backward of all micro-batches.

        empty: a new tensor, of the shape that a micro-batch's hidden states have between two stages. skip: the
        micro-batches that have no samples; every stage knows them.
        """
        self._begin()
        runs = {
            "F": ("forward", self._forward),
            "B": ("backward", self._backward),
            "W": ("weight gradients", self._weights),
        }
        for step in self._program:
            if isinstance(step, Transfer):
                if step.result_of.op.micro_batch not in skip:
                    self._transfer(step, empty)
                continue
            self._op = step
            if step.micro_batch not in skip:
                name, run = runs[step.kind]
                with self._meter.span(name, micro_batch=step.micro_batch):
                    run(step, part)
            for name in self._complete.get(step, ()):
                self.reducer.ready(name)
            if step.kind == self.schedule.last_kind:
                self._end(step.chunk)
        self._op = None
        while self._sends:
            self._sends.popleft().wait()

    def _transfer(self, transfer: Transfer, empty: Callable[[int], Tensor]) -> None:
        place, group = transfer.result_of, self._groups[transfer.result_of.op.kind]
        if transfer.kind == "recv":
            tensor = empty(place.op.micro_batch)
            self._arrived[place] = tensor, recv(tensor, transfer.peer, group, async_op=True)
            return
        tensor, _ = self._arrived.pop(place)
        self._sends.append(send(tensor, transfer.peer, group, async_op=True))
        if len(self._sends) > self.schedule.stages:  # so many may be on their way; a send owns its tensor until then
            self._sends.popleft().wait()

    def _forward(self, op: Op, part: Part) -> None:
        x = self._result_for(op)
        if x is not None:
            x.requires_grad_()
        halves: list[DeferredWeightGradient] = []
        with DeferWeightGradients(self._names, halves) if self.schedule.splits_backward else nullcontext():
            out = part(op.chunk, op.micro_batch, x)
        # The graph alone is kept: what was sent on is freed.
        self._alive[op] = x, get_gradient_edge(out)
        if self.schedule.splits_backward:
            self._halves[op] = halves
        self.peak_live = max(self.peak_live, len(self._alive.keys() | self._halves.keys()))
        self._leave_result(op, out.detach())

    def _backward(self, op: Op, part: Part) -> None:
        grad = self._result_for(op)
        x, edge = self._alive.pop(op._replace(kind="F"))
        torch.autograd.backward((edge,), None if grad is None else (grad,))
        if x is not None:
            self._leave_result(op, x.grad)

    @torch.no_grad()  # what it multiplies may have a graph, which nobody will go through
    def _weights(self, op: Op, part: Part) -> None:
        halves = self._halves.pop(op._replace(kind="F"))
        while halves:
            half = halves.pop(0)  # and what it holds is free
            self.reducer.add(half[0], weight_gradient(half))
            if all(half[0] != left for left, *_ in halves):
                self.ready(half[0])

    def _result_for(self, op: Op) -> Tensor | None:
        """What another part gave for this operation; None at the two ends of the model."""
        for need in self.schedule.needs(self.stage, op):
            if need.op.kind == op.kind:
                tensor, handle = self._arrived.pop(need)
                if handle is not None:
                    handle.wait()
                return tensor
        return None

    def _leave_result(self, op: Op, tensor: Tensor) -> None:
        """For the transfer that follows, or for the next part, when it is here as well."""
        if self.schedule.feeds(self.stage, op) is not None:
            self._arrived[StageOp(self.stage, op)] = tensor.contiguous(), None

    @torch.no_grad()
    def evaluate(self, part: Part, empty: Callable[[int], Tensor], micro_batches: int) -> None:
        """Forward of these micro-batches, none of them empty: one after another through all parts."""
        self._begin()
        for micro_batch in range(micro_batches):
            for chunk in range(self.schedule.chunks):
                op = Op("F", micro_batch, chunk)
                for need in self.schedule.needs(self.stage, op):
                    if need.stage != self.stage:
                        self._transfer(Transfer("recv", need.stage, need), empty)
                self._leave_result(op, part(chunk, micro_batch, self._result_for(op)))
                goes_to = self.schedule.feeds(self.stage, op)
                if goes_to is not None and goes_to.stage != self.stage:
                    self._transfer(Transfer("send", goes_to.stage, StageOp(self.stage, op)), empty)
        while self._sends:
            self._sends.popleft().wait()
