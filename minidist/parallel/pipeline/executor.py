"""Executor of a pipeline stage, for any schedule.

The stage's program (`transfers.insert_transfers`) lists its operations, and between them its sends and receives in an
order that all stages agree on. A receive is posted at its place in the program and waited for where its tensor is
needed, so that the transfer overlaps with computation.

Only schedules with W (zero bubble) split backward into input and weight gradients. All others run autograd's own
backward, which is faster.

Gradients go to the reducer; the executor tells it when a parameter's gradient is complete. Parameters that stages share
are reduced at the end of the step, so that their reduction does not interleave with pending transfers.
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

# Runs one part of the model: (chunk, micro-batch, output of the previous part or None) -> the part's output; that of
# the last part is the micro-batch's contribution to the loss.
Part = Callable[[int, int, Tensor | None], Tensor]


class PipelineExecutor:
    """Executor of this rank's stage of `schedule`.

    groups: over the stages, one for activations and one for gradients. reducer: receives the parameters' gradients.
    parameters: of this stage, by global name. used_by: the chunks that use each of them (`split`). shared: names of
    those that other stages use too. end: called with the chunk after each micro-batch's last backward operation.
    end_stage: the stage that holds the last part of the model. peak_live: peak number of in-flight micro-batches, as in
    `peak_live_micro_batches`.
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
        self._alive: dict[Op, tuple[Tensor | None, GradientEdge]] = {}  # by F: its input, and its graph
        self._halves: dict[Op, list[DeferredWeightGradient]] = {}  # by F: the weight gradients that B defers to W
        self._sends: deque[Handle] = deque()
        self._op: Op | None = None

    # -- the reducer's side -------------------------------------------------------------------------------------------

    def add(self, name: str, grad: Tensor) -> None:
        """Add a gradient that the running backward has accumulated to the reducer."""
        self.reducer.add(name, grad)

    def ready(self, name: str) -> None:
        """Mark a gradient as complete for the running operation, and as ready if that is the parameter's last one."""
        if name in self._complete.get(self._op, ()):
            self.reducer.ready(name)

    def weight_gradient_inputs(self) -> list[Tensor]:
        """Return the tensors that B saved for weight gradients which W has yet to compute."""
        return [tensor for halves in self._halves.values() for _, *pair in halves for tensor in pair]

    # -- the program --------------------------------------------------------------------------------------------------

    def run(self, part: Part, empty: Callable[[int], Tensor], skip: Sequence[int] = ()) -> None:
        """Run forward and backward of all micro-batches.

        empty: returns a new tensor for the hidden states (b, s, h) of a micro-batch. skip: the micro-batches without
        samples, the same on all stages.
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
        if len(self._sends) > self.schedule.stages:  # bounds the sends in flight, each of which keeps its tensor
            self._sends.popleft().wait()

    def _forward(self, op: Op, part: Part) -> None:
        x = self._result_for(op)
        if x is not None:
            x.requires_grad_()
        halves: list[DeferredWeightGradient] = []
        with DeferWeightGradients(self._names, halves) if self.schedule.splits_backward else nullcontext():
            out = part(op.chunk, op.micro_batch, x)
        # Keep only the graph, so that the output is freed once it is sent.
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

    @torch.no_grad()  # the saved tensors may have a graph, which is not needed
    def _weights(self, op: Op, part: Part) -> None:
        halves = self._halves.pop(op._replace(kind="F"))
        while halves:
            half = halves.pop(0)  # frees its tensors after this iteration
            self.reducer.add(half[0], weight_gradient(half))
            if all(half[0] != left for left, *_ in halves):
                self.ready(half[0])

    def _result_for(self, op: Op) -> Tensor | None:
        """Wait for the neighbouring part's result that `op` needs; None at the two ends of the model."""
        for need in self.schedule.needs(self.stage, op):
            if need.op.kind == op.kind:
                tensor, handle = self._arrived.pop(need)
                if handle is not None:
                    handle.wait()
                return tensor
        return None

    def _leave_result(self, op: Op, tensor: Tensor) -> None:
        """Store a result for the following transfer, or for a neighbouring part on the same stage."""
        if self.schedule.feeds(self.stage, op) is not None:
            self._arrived[StageOp(self.stage, op)] = tensor.contiguous(), None

    @torch.no_grad()
    def evaluate(self, part: Part, empty: Callable[[int], Tensor], micro_batches: int) -> None:
        """Run forward of non-empty micro-batches, one after another through all parts."""
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
