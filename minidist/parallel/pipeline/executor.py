"""Executor of a pipeline stage, for any schedule.

The stage's program (`transfers`) lists its actions, and between them its sends and receives in an
order that all stages agree on. A receive is posted at its place in the program and waited for where its tensor is
needed, so that the transfer overlaps with computation.

Only schedules with W (zero bubble) split backward into input and weight gradients. All others run autograd's own
backward, which is faster.

Gradients go to the reducer; the executor calls its `mark_ready` when a parameter's gradient is complete. Parameters
that stages share are reduced at the end of the step, so that their reduction does not interleave with pending
transfers.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from minidist.comm import Group, Handle, recv, send
from minidist.parallel.data.reducer import GradientReducer, trainable_parameters
from minidist.parallel.pipeline.actions import Action, Schedule, StageAction, last_backward_index
from minidist.parallel.pipeline.split_backward import (
    DeferredWeightGradient,
    DeferWeightGradients,
    compute_weight_gradient,
)
from minidist.parallel.pipeline.transfers import StageProgram, Transfer, build_stage_programs

# Runs a chunk of this stage: (chunk, micro-batch, output of the previous part or None) -> the chunk's output; that of
# the model's last part is the micro-batch's contribution to the loss.
RunPart = Callable[[int, int, Tensor | None], Tensor]
# Returns a new tensor for the hidden states of a micro-batch, by its number.
EmptyHidden = Callable[[int], Tensor]


class PipelineExecutor:
    """Runs this rank's stage of a pipeline schedule: forward, backward, sends and receives of all micro-batches.

    schedule: the actions of all stages. groups: two process groups over the stages, one for activations and one for
    gradients. reducer: receives the gradients of the parameters. parameters: this stage's, by global name. used_by: the
    chunks of this stage that use each parameter (`keep_stage_modules`). shared: names of the parameters that other
    stages use too.

    Attributes: last_part_stage: the stage that holds the last part of the model. peak_live: peak number of in-flight
    micro-batches.
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
        self.schedule = schedule
        self.stage = groups[0].rank
        self.reducer = reducer
        self._groups = dict(zip("FB", groups, strict=True))
        self._meter = groups[0].meter
        self._program: StageProgram = build_stage_programs(schedule)[self.stage]
        trained = trainable_parameters(parameters)
        self._names = {parameter: name for name, parameter in trained.items()}
        ends = last_backward_index(schedule, self.stage)
        self._completed_by: dict[Action, list[str]] = {}
        for name, chunks in used_by.items():
            if name not in shared and chunks and name in trained:
                action = schedule.orders[self.stage][max(ends[chunk] for chunk in chunks)]
                self._completed_by.setdefault(action, []).append(name)
        self.last_part_stage = schedule.owner(schedule.num_parts - 1)[0]
        self.peak_live = 0
        self._reset()

    def _reset(self) -> None:
        """Forget what an earlier run left behind, also one that failed."""
        self._results: dict[StageAction, tuple[Tensor, Handle | None]] = {}  # results of other parts
        self._live_forwards: dict[Action, tuple[Tensor | None, GradientEdge]] = {}  # by F: its input, and its graph
        self._deferred: dict[Action, list[DeferredWeightGradient]] = {}  # by F: the weight gradients that B defers to W
        self._sends: deque[Handle] = deque()
        self._running: Action | None = None

    def is_last_backward(self, name: str) -> bool:
        """Whether the running action is the last of this step to compute a gradient of parameter `name`."""
        return name in self._completed_by.get(self._running, ())

    def weight_gradient_inputs(self) -> list[Tensor]:
        """Return the tensors that backward keeps for weight gradients not computed yet (split backward)."""
        return [tensor for deferred in self._deferred.values() for _, *pair in deferred for tensor in pair]

    def run(self, run_part: RunPart, empty_hidden: EmptyHidden, skip: Sequence[int] = ()) -> None:
        """Collective over the stages: run forward and backward of all micro-batches.

        run_part: runs one chunk of the stage (see `RunPart`). empty_hidden: returns a new tensor for the hidden states
        (b, s, h) of a micro-batch, by its number. skip: the micro-batches without samples, the same on all stages.
        """
        self._reset()
        runs = {
            "F": ("forward", self._forward),
            "B": ("backward", self._backward),
            "W": ("weight gradients", self._weight_gradients),
        }
        for step in self._program:
            if isinstance(step, Transfer):
                if step.result_of.action.micro_batch not in skip:
                    self._post_transfer(step, empty_hidden)
                continue
            self._running = step
            if step.micro_batch not in skip:
                name, run = runs[step.kind]
                with self._meter.span(name, micro_batch=step.micro_batch):
                    run(step, run_part)
            for name in self._completed_by.get(step, ()):
                self.reducer.mark_ready(name)
            if step.kind == self.schedule.last_action_kind:
                self.reducer.finish_micro_batch(step.chunk)
        self._running = None
        while self._sends:
            self._sends.popleft().wait()

    def _post_transfer(self, transfer: Transfer, empty_hidden: EmptyHidden) -> None:
        """Start a send or a receive. Waits for the oldest send if more are in flight than the pipeline has stages."""
        place = transfer.result_of
        group = self._groups[transfer.result_of.action.kind]
        if transfer.kind == "recv":
            tensor = empty_hidden(place.action.micro_batch)
            self._results[place] = tensor, recv(tensor, transfer.peer, group, async_op=True)
            return
        tensor, _ = self._results.pop(place)
        self._sends.append(send(tensor, transfer.peer, group, async_op=True))
        if len(self._sends) > self.schedule.num_stages:  # bounds the sends in flight, each of which keeps its tensor
            self._sends.popleft().wait()

    def _forward(self, action: Action, run_part: RunPart) -> None:
        """Run forward of a micro-batch through a chunk, and store the output for the next part."""
        x = self._wait_for_input(action)
        if x is not None:
            x.requires_grad_()
        deferred: list[DeferredWeightGradient] = []
        with DeferWeightGradients(self._names, deferred) if self.schedule.splits_backward else nullcontext():
            out = run_part(action.chunk, action.micro_batch, x)
        # Keep only the graph, so that the output is freed once it is sent.
        self._live_forwards[action] = x, get_gradient_edge(out)
        if self.schedule.splits_backward:
            self._deferred[action] = deferred
        self.peak_live = max(self.peak_live, len(self._live_forwards.keys() | self._deferred.keys()))
        self._store_result(action, out.detach())

    def _backward(self, action: Action, run_part: RunPart) -> None:
        """Run backward of a chunk, or its input gradient (B) if split; store the input's gradient."""
        grad = self._wait_for_input(action)
        x, edge = self._live_forwards.pop(action._replace(kind="F"))
        torch.autograd.backward((edge,), None if grad is None else (grad,))
        if x is not None:
            self._store_result(action, x.grad)

    @torch.no_grad()  # the saved tensors may have a graph, which is not needed
    def _weight_gradients(self, action: Action, run_part: RunPart) -> None:
        """Compute the weight gradients (W) that B deferred, and pass them to the reducer."""
        deferred = self._deferred.pop(action._replace(kind="F"))
        while deferred:
            half = deferred.pop(0)  # frees its tensors after this iteration
            self.reducer.accumulate(half[0], compute_weight_gradient(half))
            if self.is_last_backward(half[0]) and all(half[0] != left for left, *_ in deferred):
                self.reducer.mark_ready(half[0])

    def _wait_for_input(self, action: Action) -> Tensor | None:
        """Wait for the neighbouring part's result that `action` needs; None at the two ends of the model."""
        for need in self.schedule.dependencies(self.stage, action):
            if need.action.kind == action.kind:
                tensor, handle = self._results.pop(need)
                if handle is not None:
                    handle.wait()
                return tensor
        return None

    def _store_result(self, action: Action, tensor: Tensor) -> None:
        """Store a result for the following transfer, or for a neighbouring part on the same stage."""
        if self.schedule.consumer(self.stage, action) is not None:
            self._results[StageAction(self.stage, action)] = tensor.contiguous(), None

    @torch.no_grad()
    def run_forward(self, run_part: RunPart, empty_hidden: EmptyHidden, micro_batches: int) -> None:
        """Collective over the stages: run forward of `micro_batches` non-empty micro-batches, one after another.

        run_part, empty_hidden: as in `run`. The results reach the caller only through `run_part`.
        """
        self._reset()
        for micro_batch in range(micro_batches):
            for chunk in range(self.schedule.num_chunks):
                action = Action("F", micro_batch, chunk)
                for need in self.schedule.dependencies(self.stage, action):
                    if need.stage != self.stage:
                        self._post_transfer(Transfer("recv", need.stage, need), empty_hidden)
                self._store_result(action, run_part(chunk, micro_batch, self._wait_for_input(action)))
                consumer = self.schedule.consumer(self.stage, action)
                if consumer is not None and consumer.stage != self.stage:
                    self._post_transfer(Transfer("send", consumer.stage, StageAction(self.stage, action)), empty_hidden)
        while self._sends:
            self._sends.popleft().wait()
