"""What a pipeline does, as data: for every stage its operations, in the order in which it runs them.

The model is cut into `stages * chunks` parts, numbered from the input on: the positions. A stage (one rank of the
mesh's pp axis) holds `chunks` of them, and `placement` says which:

    loop   chunk c of stage s is part c * stages + s (Narayanan et al. 2021, section 2.2: interleaved)
    v      chunk 0 goes down the stages and chunk 1 comes back up, so that stage 0 holds the first part and the last
           (Qi et al. 2023, section 6: ZB-V)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple


class Op(NamedTuple):
    """One operation of a stage: F forward, B backward or W weight gradient, of a micro-batch through a chunk.

    In a schedule without W, B is the whole backward. In one with W it is the half that others wait for, the gradient of
    the chunk's input; W is the half nobody waits for, the gradient of its weights (Qi et al. 2023, section 1).
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
    """Who does what, in which order. When it happens follows from that and from how long the operations take.

    kind: its name. orders: for every stage its operations. chunks: parts of the model on each stage.
    """

    kind: str
    micro_batches: int
    orders: Sequence[Sequence[Op]]
    chunks: int = 1
    placement: Literal["loop", "v"] = "loop"

    @property
    def stages(self) -> int:
        return len(self.orders)

    @property
    def positions(self) -> int:
        """Parts of the model."""
        return self.stages * self.chunks

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the backward comes in two halves, B and W."""
        return any(op.kind == "W" for order in self.orders for op in order)

    @property
    def last_kind(self) -> str:
        """The operation after which a micro-batch's activations are free and its gradients complete."""
        return "W" if self.splits_backward else "B"

    def position(self, stage: int, chunk: int) -> int:
        """Which part of the model a stage's chunk is."""
        if self.placement == "v" and chunk % 2:
            return (chunk + 1) * self.stages - 1 - stage
        return chunk * self.stages + stage

    def owner(self, position: int) -> tuple[int, int]:
        """The stage and the chunk that hold a part of the model."""
        chunk, stage = divmod(position, self.stages)
        return (self.stages - 1 - stage if self.placement == "v" and chunk % 2 else stage), chunk

    def needs(self, stage: int, op: Op) -> list[StageOp]:
        """What must have ended before a stage runs `op`; what another stage has ended must also have arrived.

        F needs the part before it, B its own F and the part after it, W its own B.
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
        """The next part's operation that needs the result of `op`; None at the ends of the model, and for W."""
        before, after = self._neighbours[stage, op.chunk]
        neighbour = {"F": after, "B": before}.get(op.kind)
        return neighbour and StageOp(neighbour[0], Op(op.kind, op.micro_batch, neighbour[1]))

    @cached_property
    def _neighbours(self) -> dict[tuple[int, int], list[tuple[int, int] | None]]:
        """Of every stage's chunk, the stages and chunks that hold the parts before and after it; None at the ends."""
        owners = [None, *(self.owner(position) for position in range(self.positions)), None]
        return {owners[i]: [owners[i - 1], owners[i + 1]] for i in range(1, len(owners) - 1)}


def execution_order(schedule: Schedule) -> tuple[list[StageOp], Mapping[int, StageOp]]:
    """The operations in an order in which everything that one needs stands before it; and who is stuck.

    Every stage runs its operations one after another, each as soon as what it needs has been done, however long that
    takes. A stage that does not come to its end is stuck: {stage: what its next operation waits for}.
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
    """After which of its operations the gradients of each of a stage's chunks are complete: {chunk: index}."""
    return {op.chunk: index for index, op in enumerate(schedule.orders[stage]) if op.kind == schedule.last_kind}
