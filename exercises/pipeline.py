"""Run an answer's executor of a small pipeline on all ranks and record what it does; simulate schedules.

Independent of the package's code. A schedule has a list of actions for every stage: ("F", i), ("B", i) or ("W", i). F
of a micro-batch needs its F on the stage before; B needs its own F, and its B on the stage after.
"""

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from exercises.conditions import FLOATS, Declaration, Drawn, Tensors, exact
from exercises.testing import Wrong, expect, show

TOKENS, WIDTH = 3, 4


class ScheduleResult(NamedTuple):
    """The end time of a schedule, and each stage's peak number of in-flight micro-batches."""

    end: float
    peak_in_flight: list[int]


class Stage:
    """This rank's stage of a small pipeline, whose actions are recorded; float64 unless `dtype` says otherwise.

    samples: the number of samples of each micro-batch, by its number. is_transposed: whether outputs are transposed
    tensors, which are not contiguous. is_split: whether the gradients of weights are computed in actions of their own.
    parameters: the stage's, by name. operations: the actions (kind, micro-batch) in the order in which they ran. kept:
    by micro-batch, how many micro-batches had tensors saved for backward when its backward began. outputs: without
    their graph, by micro-batch. added: the sums of the gradients that `add` got, by name; number_added: how many.
    referenced: at each `note_backward_done`, how many micro-batches had an input or output that was still referenced.
    """

    def __init__(
        self,
        stage: int,
        stages: int,
        samples: Mapping[int, int],
        dtype=torch.float64,
        is_transposed=False,
        is_split=False,
    ):
        self.stage, self.last, self.samples, self.dtype = stage, stages - 1, samples, dtype
        self.weight, self.shift = (nn.Parameter(each) for each in _make_parameters(stage, dtype))
        self.parameters = {"weight": self.weight, "shift": self.shift}
        self.added: dict[str, Tensor] = {}
        self.number_added = 0
        self.operations: list[tuple[str, int]] = []
        self.outputs: dict[int, Tensor] = {}
        self._is_split = is_split
        self.kept: dict[int, int] = {}
        self._saved: dict[int, StorageWeakRef] = {}
        self.referenced: list[int] = []
        self._pairs: dict[int, list[weakref.ref]] = {}  # of input and output
        self._is_transposed = is_transposed

    def run(self, i: int, hidden: Tensor | None) -> Tensor:
        """Run the stage's layer on a micro-batch; the last stage returns the loss."""
        if (hidden is None) != (self.stage == 0):
            what = f"the second argument of run_stage for micro-batch {i} on stage {self.stage} of {self.last + 1}"
            expected = "None" if self.stage == 0 else "the output of the stage before it"
            raise Wrong("wrong", what, expected, "None" if hidden is None else show(tuple(hidden.shape)))
        self.operations.append(("F", i))
        x = _make_inputs(i, self.samples[i], self.dtype) if hidden is None else hidden
        inside = x @ self.weight
        self._saved[i] = StorageWeakRef(inside.untyped_storage())  # sin saves its input
        out = inside.sin() + self.shift
        if self._is_transposed:
            out = out.mT.contiguous().mT
        if self.stage == self.last:
            out = (out * _make_loss_factors(i, self.samples[i], self.dtype)).sum()
        self.outputs[i] = out.detach().clone()
        if out.requires_grad:
            out.register_hook(lambda _: self._begin_backward(i))
        self._pairs[i] = [weakref.ref(each) for each in (hidden, out) if each is not None]
        return out

    def note_backward_done(self) -> None:
        """Record how many micro-batches have an input or output that is still referenced; for `on_backward_done`."""
        self.referenced.append(sum(any(each() is not None for each in pair) for pair in self._pairs.values()))

    def _begin_backward(self, i: int) -> None:
        """Record that the backward of micro-batch `i` begins: B, or W if its input gradient is computed."""
        is_second = ("B", i) in self.operations or (self._is_split and self.stage == 0)
        self.operations.append(("W" if is_second else "B", i))
        self.kept[i] = sum(not reference.expired() for reference in self._saved.values())

    def add(self, name: str, gradient: Tensor) -> None:
        """Add one micro-batch's gradient of a parameter to its sum."""
        if name not in self.parameters:
            raise Wrong("wrong", "the name of a parameter that `add` gets", " or ".join(self.parameters), show(name))
        self.added[name] = self.added.get(name, 0) + gradient
        self.number_added += 1

    def empty_hidden(self, i: int) -> Tensor:
        """Return a new tensor for the hidden states of micro-batch `i`; its elements are NaN."""
        return torch.full((self.samples[i], TOKENS, WIDTH), torch.nan, dtype=self.dtype)

    @property
    def gradients(self) -> list[Tensor | None]:
        """The gradients of the weight and the shift."""
        return [self.weight.grad, self.shift.grad]


def gpipe_actions(micro_batches: Sequence[int]) -> list[tuple[str, int]]:
    """Return the actions of any stage: all forwards, then all backwards."""
    return [("F", i) for i in micro_batches] + [("B", i) for i in micro_batches]


def one_f_one_b_actions(micro_batches: Sequence[int], limit: int) -> list[tuple[str, int]]:
    """Return the actions of a stage that has at most `limit` micro-batches in flight, and runs forward if it may."""
    forwards, in_flight, actions = deque(micro_batches), deque(), []
    while forwards or in_flight:
        if forwards and len(in_flight) < limit:
            in_flight.append(forwards.popleft())
            actions.append(("F", in_flight[-1]))
        else:
            actions.append(("B", in_flight.popleft()))
    return actions


def make_executor(answer, groups: tuple, stage: Stage, actions: Sequence[tuple[str, int]]):
    """Return the answer's executor for a stage. groups: for hidden states and for their gradients."""
    return answer.PipelineExecutor(list(actions), *groups, stage.parameters, stage.add)


def run_executor(answer, groups: tuple, actions: Sequence[tuple[str, int]], samples: Mapping[int, int], **settings):
    """Run actions once on a new stage, without the micro-batches that have no samples; return the stage."""
    stage = Stage(groups[0].rank, groups[0].size, samples, **settings)
    skip = {i for _, i in actions} - samples.keys()
    make_executor(answer, groups, stage, actions).run(stage.run, stage.empty_hidden, skip, stage.note_backward_done)
    return stage


def gradients_of_one_process(stages: int, samples: Mapping[int, int]) -> list[list[Tensor | None]]:
    """Return the gradients of every stage's parameters, of all micro-batches in one process."""
    parameters = [[each.requires_grad_() for each in _make_parameters(stage, torch.float64)] for stage in range(stages)]
    for i, number in samples.items():
        x = _make_inputs(i, number, torch.float64)
        for weight, shift in parameters:
            x = (x @ weight).sin() + shift
        (x * _make_loss_factors(i, number, torch.float64)).sum().backward()
    return [[each.grad for each in pair] for pair in parameters]


def _random_tensor(seed: int, *shape: int) -> Tensor:
    """Return a float64 tensor of normal numbers, equal for equal seeds."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _make_parameters(stage: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return weight and shift of a stage."""
    return _random_tensor(stage, WIDTH, WIDTH).to(dtype), _random_tensor(100 + stage, WIDTH).to(dtype)


def _make_inputs(i: int, samples: int, dtype: torch.dtype) -> Tensor:
    """Return the first stage's input of micro-batch `i`."""
    return _random_tensor(1000 + i, samples, TOKENS, WIDTH).to(dtype)


def _make_loss_factors(i: int, samples: int, dtype: torch.dtype) -> Tensor:
    """Return the numbers by which the loss multiplies the outputs of micro-batch `i`."""
    return _random_tensor(2000 + i, samples, TOKENS, WIDTH).to(dtype)


def expect_each_operation_once(orders: Sequence[Sequence[tuple[str, int]]], micro_batches: Sequence[int]) -> None:
    """Fail unless every stage runs every micro-batch once forward and once backward, F first."""
    expected = sorted((kind, micro_batch) for kind in "FB" for micro_batch in micro_batches)
    for stage, order in enumerate(orders):
        case = f"stage {stage} of {len(orders)}, {len(micro_batches)} micro-batches"
        expect(
            "the actions, sorted",
            operation_names(sorted(order)),
            operation_names(expected),
            case=case,
        )


def expect_messages(network, before: int, groups: tuple, actions, samples: Mapping[int, int], case: str) -> None:
    """Fail unless this stage has sent one message per micro-batch and neighbour since record `before`, in order."""
    records, group = network.records[before:], groups[0]
    for kind, what, neighbour in (("F", "the next stage", group.rank + 1), ("B", "the stage before", group.rank - 1)):
        sent = [record.payload_bytes // 8 for record in records if record.name == "send" and record.peer == neighbour]
        order = [i for each, i in actions if each == kind and i in samples]
        sizes = [samples[i] * TOKENS * WIDTH for i in order] * (0 <= neighbour < group.size)
        expect(f"elements of each message to {what}", sent, sizes, case=case)
    others = sorted({record.name for record in records} - {"send", "recv"})
    expect("operations besides send and recv", others, [], case=case)
    unfinished = [record.name for record in records if record.waited is None]
    expect("operations that your code has not waited for", unfinished, [], case=case)


def sums_of_tensors(answer, group, weight: Tensor, micro_batches: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Run 1F1B on stages that add their weight; return the gradient of the weight and the stage's outputs.

    For `exercises.conditions`: the numbers are exact in every dtype.
    """
    parameter, outputs = nn.Parameter(weight.detach().clone()), {}

    def run_stage(i: int, hidden: Tensor | None) -> Tensor:
        x = torch.full((i % 3 + 1, *weight.shape), i, dtype=weight.dtype) if hidden is None else hidden
        outputs[i] = (x + parameter).detach().clone()
        out = x + parameter
        return (out * (i % 2 + 1)).sum() if group.rank == group.size - 1 else out

    actions = one_f_one_b_actions(micro_batches, group.size - group.rank)
    executor = answer.PipelineExecutor(actions, group, group, {"weight": parameter}, None)
    with torch.enable_grad():
        executor.run(run_stage, lambda i: weight.new_empty(i % 3 + 1, *weight.shape))
    return parameter.grad, [outputs[i] for i in micro_batches]


def sums_of_one_process(ranks: list[dict], rank: int) -> tuple[Tensor, list[Tensor]]:
    """Return what `sums_of_tensors` must return on a rank."""
    weights, micro_batches = [each["weight"] for each in ranks], ranks[0]["micro_batches"]
    total = sum(exact(weight) for weight in weights[: rank + 1])
    outputs = [(torch.full((i % 3 + 1, *total.shape), i) + total).to(weights[0].dtype) for i in micro_batches]
    slope = float(sum((i % 3 + 1) * (i % 2 + 1) for i in micro_batches))
    return torch.full_like(weights[0], slope), outputs


def declare_executor() -> Declaration:
    """Return the declaration of a step of the executor."""
    draws = {"one micro-batch": 1, "some numbers left out": 2, "a micro-batch per rank": 3, "three per rank": 4}
    return Declaration(
        inputs={
            "weight": Tensors(dtypes=FLOATS, layouts=(), sizes=False, non_finite=False),
            "micro_batches": Drawn(
                lambda rank, ranks, draw: ([0, 1, 2, 3], [0], [0, 2, 3, 6], range(ranks), range(3 * ranks))[draw], draws
            ),
        },
        call=lambda answer, group, weight, micro_batches: sums_of_tensors(answer, group, weight, list(micro_batches)),
        reference=sums_of_one_process,
        max_bytes=lambda ranks: (
            2 * (len(ranks) - 1) * ranks[0]["weight"].nbytes * sum(i % 3 + 1 for i in ranks[0]["micro_batches"])
        ),
    )


def expect_schedule(schedule: object, stages: int, case: str) -> list[list[tuple[str, int]]]:
    """Return a schedule; fail unless it is a list of `stages` lists of pairs such as ("F", 0)."""
    if schedule is None:
        raise Wrong("type", "the function returned None: is a `return` missing?", "a list of lists", "None")
    if type(schedule) is not list or not all(type(actions) is list for actions in schedule):
        raise Wrong("type", "a schedule is a list of lists, one per stage", "a list of lists", show(schedule), case)
    expect("the number of lists, one per stage", len(schedule), stages, case=case)
    for action in (action for actions in schedule for action in actions):
        if type(action) is not tuple or [type(each) for each in action] != [str, int]:
            raise Wrong("type", "an action is a pair of a kind and a number", '("F", 0)', show(action), case)
    return schedule


def simulate_schedule(
    orders: Sequence[Sequence[tuple[str, int]]], f: float, b: float, comm: float = 0.0
) -> ScheduleResult:
    """Simulate a schedule with times `f` of F, `b` of B and `comm` of a transfer. Raises Wrong if stages deadlock."""
    stages, ends, peak_in_flight = len(orders), {}, []
    next_operation, clock = [0] * stages, [0.0] * stages
    progressed = True
    while progressed:
        progressed = False
        for stage, order in enumerate(orders):
            while next_operation[stage] < len(order):
                kind, micro_batch = order[next_operation[stage]]
                needs = [(stage, ("F", micro_batch), 0.0)] if kind == "B" else []
                neighbour = stage + 1 if kind == "B" else stage - 1
                if 0 <= neighbour < stages:
                    needs.append((neighbour, (kind, micro_batch), comm))
                if not all((place, op) in ends for place, op, _ in needs):
                    break
                start = max([clock[stage], *(ends[place, op] + late for place, op, late in needs)])
                clock[stage] = ends[stage, (kind, micro_batch)] = start + (f if kind == "F" else b)
                next_operation[stage] += 1
                progressed = True
    stuck = [
        f"stage {stage} at {operation_names([order[next_operation[stage]]])}"
        for stage, order in enumerate(orders)
        if next_operation[stage] < len(order)
    ]
    if stuck:
        raise Wrong("wrong", f"the stages wait for each other for ever: {', '.join(stuck)}", case=f"{stages} stages")
    for order in orders:
        in_flight = peak = 0
        for kind, _ in order:
            in_flight += 1 if kind == "F" else -1
            peak = max(peak, in_flight)
        peak_in_flight.append(peak)
    return ScheduleResult(max(clock), peak_in_flight)


def operation_names(ops: Sequence[tuple[str, int]]) -> str:
    """Return the operations as text: "F0 F1 B0"."""
    return " ".join(f"{kind}{micro_batch}" for kind, micro_batch in ops)
