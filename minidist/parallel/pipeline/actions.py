"""Pipeline schedules as data: for each stage its actions, in execution order.

The model is split into `num_stages * num_chunks` parts (model chunks or virtual stages in Megatron-LM); a part's
position is its number, counted from the input. A stage (one rank of the mesh's pp axis) holds `num_chunks` parts, its
chunks 0, 1, ... The `placement` says which parts these are:

    loop   chunk c of stage s is part c * num_stages + s (Narayanan et al. 2021, section 2.2: interleaved)
    v      chunk 0 goes down the stages and chunk 1 back up, so stage 0 holds the first and the last part
           (Qi et al. 2023, section 6: ZB-V)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple


class Action(NamedTuple):
    """An action of a pipeline stage on one micro-batch and chunk: forward (F), backward (B) or weight gradient (W).

    kind: "F", "B" or "W". chunk: the chunk's number on the stage. str(action): "F3" (micro-batch 3), "F3.1" (chunk 1).
    In a schedule without W, B is the full backward. With W, backward is split: B computes the gradient of the chunk's
    input, which the previous part of the model waits for, and W the gradient of its weights (Qi et al. 2023, section
    1).
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


class StageAction(NamedTuple):
    """An action and the stage that runs it."""

    stage: int
    action: Action

    def __str__(self) -> str:
        return f"{self.action} of stage {self.stage}"


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: the order of each stage's actions.

    kind: the schedule's name. micro_batches: the number of micro-batches in a step. orders: for each stage its actions,
    in execution order. num_chunks: number of parts of the model on each stage. placement: "loop" if chunk c of stage s
    is part c * num_stages + s; "v" if chunk 0 goes down the stages and chunk 1 back up.
    """

    kind: str
    micro_batches: int
    orders: Sequence[Sequence[Action]]
    num_chunks: int = 1
    placement: Literal["loop", "v"] = "loop"

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.orders)

    @property
    def num_parts(self) -> int:
        """Number of parts of the model, `num_stages * num_chunks`."""
        return self.num_stages * self.num_chunks

    @cached_property
    def splits_backward(self) -> bool:
        """Whether backward is split into input gradient (B) and weight gradient (W)."""
        return any(action.kind == "W" for order in self.orders for action in order)

    @property
    def last_action_kind(self) -> str:
        """Kind of the action that frees a micro-batch's activations on a chunk: "W", or "B" if it is not split."""
        return "W" if self.splits_backward else "B"

    def position(self, stage: int, chunk: int) -> int:
        """Return the index of the part of the model that a chunk of a stage holds, counted from the input."""
        if self.placement == "v" and chunk % 2:
            return (chunk + 1) * self.num_stages - 1 - stage
        return chunk * self.num_stages + stage

    def owner(self, position: int) -> tuple[int, int]:
        """Return the (stage, chunk) that holds part number `position` of the model. The inverse of `position()`."""
        chunk, stage = divmod(position, self.num_stages)
        return (self.num_stages - 1 - stage if self.placement == "v" and chunk % 2 else stage), chunk

    def dependencies(self, stage: int, action: Action) -> list[StageAction]:
        """Return the actions whose results a stage needs to run `action`.

        F needs F of the previous part; B needs its own F, and B of the next part; W needs its own B.
        """
        if action.kind == "W":
            return [StageAction(stage, Action("B", action.micro_batch, action.chunk))]
        before, after = self._neighbours[stage, action.chunk]
        own = [StageAction(stage, Action("F", action.micro_batch, action.chunk))] if action.kind == "B" else []
        neighbour = after if action.kind == "B" else before
        if neighbour is None:
            return own
        return [*own, StageAction(neighbour[0], Action(action.kind, action.micro_batch, neighbour[1]))]

    def consumer(self, stage: int, action: Action) -> StageAction | None:
        """Return the action, with its stage, that needs the result of `action` of `stage` on a neighbouring part.

        F feeds F of the next part, B feeds B of the previous part. None at the model's ends, and for W.
        """
        before, after = self._neighbours[stage, action.chunk]
        neighbour = {"F": after, "B": before}.get(action.kind)
        return neighbour and StageAction(neighbour[0], Action(action.kind, action.micro_batch, neighbour[1]))

    @cached_property
    def _neighbours(self) -> dict[tuple[int, int], list[tuple[int, int] | None]]:
        """For each (stage, chunk), the (stage, chunk) of the previous and the next part; None at the model's ends."""
        owners = [None, *(self.owner(position) for position in range(self.num_parts)), None]
        return {owners[i]: [owners[i - 1], owners[i + 1]] for i in range(1, len(owners) - 1)}


def find_order_and_deadlocks(schedule: Schedule) -> tuple[list[StageAction], Mapping[int, StageAction]]:
    """Return all runnable actions in an order in which they can run, and {stage: missing action} for deadlocked stages.

    Each stage runs its actions in order, as soon as their inputs exist. The second result has an entry for each stage
    that cannot finish: the action whose result it waits for. It is empty without a deadlock.
    """
    done: dict[StageAction, None] = {}
    at = [0] * schedule.num_stages
    waiting: dict[StageAction, list[int]] = {}
    awake = list(range(schedule.num_stages))
    while awake:
        stage = awake.pop()
        order = schedule.orders[stage]
        while at[stage] < len(order):
            action = order[at[stage]]
            missing = next((need for need in schedule.dependencies(stage, action) if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(stage)
                break
            done[StageAction(stage, action)] = None
            at[stage] += 1
            awake += waiting.pop(StageAction(stage, action), [])
    return list(done), {stage: missing for missing, stages in waiting.items() for stage in stages}


def last_backward_index(schedule: Schedule, stage: int) -> dict[int, int]:
    """Return, by chunk, the index in `schedule.orders[stage]` of the action that completes the chunk's gradients."""
    return {
        action.chunk: index
        for index, action in enumerate(schedule.orders[stage])
        if action.kind == schedule.last_action_kind
    }
