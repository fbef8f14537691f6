"""Pipeline schedules as data: for each stage its operations, in execution order.

The model is split into `stages * chunks` parts; a part's position is its number, counted from the input. A stage (one
rank of the mesh's pp axis) holds `chunks` parts, given by `placement`:

    loop   chunk c of stage s is part c * stages + s (Narayanan et al. 2021, section 2.2: interleaved)
    v      chunk 0 goes down the stages and chunk 1 back up, so stage 0 holds the first and the last part
           (Qi et al. 2023, section 6: ZB-V)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple


class Op(NamedTuple):
    """An operation on one micro-batch and chunk: F forward, B backward or W weight gradient.

    In a schedule without W, B is the full backward. With W, backward is split: B computes the gradient of the chunk's
    input, which the previous part waits for, and W the gradient of its weights (Qi et al. 2023, section 1).
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


class StageOp(NamedTuple):
    """An operation and the stage that runs it."""

    stage: int
    op: Op

    def __str__(self) -> str:
        return f"{self.op} of stage {self.stage}"


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: the order of each stage's operations.

    kind: the schedule's name. orders: for each stage its operations. chunks: parts of the model on each stage.
    """

    kind: str
    micro_batches: int
    orders: Sequence[Sequence[Op]]
    chunks: int = 1
    placement: Literal["loop", "v"] = "loop"

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.orders)

    @property
    def positions(self) -> int:
        """Number of parts of the model, `stages * chunks`."""
        return self.stages * self.chunks

    @cached_property
    def splits_backward(self) -> bool:
        """Whether backward is split into input gradient (B) and weight gradient (W)."""
        return any(op.kind == "W" for order in self.orders for op in order)

    @property
    def last_kind(self) -> str:
        """The kind of a micro-batch's last operation, which frees its activations: W if backward is split, else B."""
        return "W" if self.splits_backward else "B"

    def position(self, stage: int, chunk: int) -> int:
        """Return the number of the part of the model that is a stage's chunk."""
        if self.placement == "v" and chunk % 2:
            return (chunk + 1) * self.stages - 1 - stage
        return chunk * self.stages + stage

    def owner(self, position: int) -> tuple[int, int]:
        """Return the (stage, chunk) that holds part `position` of the model. The inverse of `position`."""
        chunk, stage = divmod(position, self.stages)
        return (self.stages - 1 - stage if self.placement == "v" and chunk % 2 else stage), chunk

    def needs(self, stage: int, op: Op) -> list[StageOp]:
        """Return the operations whose results a stage needs to run `op`.

        F needs F of the previous part; B needs its own F, and B of the next part; W needs its own B.
        """
        if op.kind == "W":
            return [StageOp(stage, Op("B", op.micro_batch, op.chunk))]
        before, after = self._neighbours[stage, op.chunk]
        own = [StageOp(stage, Op("F", op.micro_batch, op.chunk))] if op.kind == "B" else []
        neighbour = after if op.kind == "B" else before
        if neighbour is None:
            return own
        return [*own, StageOp(neighbour[0], Op(op.kind, op.micro_batch, neighbour[1]))]

    def feeds(self, stage: int, op: Op) -> StageOp | None:
        """Return the other part's operation that needs the result of `op`; None at the model's ends, and for W."""
        before, after = self._neighbours[stage, op.chunk]
        neighbour = {"F": after, "B": before}.get(op.kind)
        return neighbour and StageOp(neighbour[0], Op(op.kind, op.micro_batch, neighbour[1]))

    @cached_property
    def _neighbours(self) -> dict[tuple[int, int], list[tuple[int, int] | None]]:
        """(stage, chunk) to the (stage, chunk) of the previous and the next part; None at the model's ends."""
        owners = [None, *(self.owner(position) for position in range(self.positions)), None]
        return {owners[i]: [owners[i - 1], owners[i + 1]] for i in range(1, len(owners) - 1)}


def execution_order(schedule: Schedule) -> tuple[list[StageOp], Mapping[int, StageOp]]:
    """Return all runnable operations in a topological order, and the stages that deadlock.

    Each stage runs its operations in order, as soon as their inputs exist. For a stage that cannot finish, the second
    result has the operation that it waits for: {stage: missing operation}.
    """
    done: dict[StageOp, None] = {}
    at = [0] * schedule.stages
    waiting: dict[StageOp, list[int]] = {}
    awake = list(range(schedule.stages))
    while awake:
        stage = awake.pop()
        order = schedule.orders[stage]
        while at[stage] < len(order):
            op = order[at[stage]]
            missing = next((need for need in schedule.needs(stage, op) if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(stage)
                break
            done[StageOp(stage, op)] = None
            at[stage] += 1
            awake += waiting.pop(StageOp(stage, op), [])
    return list(done), {stage: missing for missing, stages in waiting.items() for stage in stages}


def last_backward_index(schedule: Schedule, stage: int) -> dict[int, int]:
    """Return {chunk: index of the stage's operation after which the chunk's gradients are complete}."""
    return {op.chunk: index for index, op in enumerate(schedule.orders[stage]) if op.kind == schedule.last_kind}
