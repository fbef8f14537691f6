"""The flat parameters of a layout, for ZeRO or for masters of another dtype, and the messages that carry them.

`zero.plan` lays them out, for the trainer and for the estimate.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minidist.precision.policy import PRECISION_BYTES
from minidist.process_groups import GRADIENT_GROUPS, is_hidden_matrix
from minidist.tools.estimate import states
from minidist.tools.estimate.gradient_reduction import MIB, Groups, contributors
from minidist.tools.estimate.layout import Layout
from minidist.tools.estimate.states import Weight, weights
from minidist.zero.plan import ROOT, block_of, gathers, plan_flat_params
from minidist.zero.plan import Layout as FlatLayout

Operation = tuple[str, str, int, int]


@dataclass(frozen=True)
class Row:
    """One flat parameter.

    outer: the group over which replicas of a shard are summed; None without replicas. chunk: of the pipeline stage,
    the one whose backward completes the gradients. block: the layer it is gathered with in stage 3; ROOT for the rest.
    """

    layout: FlatLayout
    outer: str | None
    chunk: int
    block: int


def apart(layout: Layout) -> bool:
    """Whether parameters are flattened: not where all tensors have one dtype and nothing is sharded."""
    return layout.config.zero.stage > 0 or not layout.policy.uniform


def rows(layout: Layout, groups: Groups, rank: int) -> list[Row]:
    """The flat parameters of a rank, in the order of backward."""
    stage, config = layout.mesh.coords(rank)["pp"], layout.config
    found = {weight.name: weight for weight in weights(layout, stage)}
    planned = plan_flat_params(
        {name: weight.numel for name, weight in found.items()},
        lambda name: (_outer(layout, groups, rank, found[name]), _chunk(layout, stage, found[name])),
        config.zero,
        config.zero.shard_group_size(layout.mesh),
        int(config.comm.bucket_mib * MIB),
        PRECISION_BYTES[layout.policy.reduce],
    )
    return [Row(each.layout, *each.kind, each.block) for each in planned]


def _outer(layout: Layout, groups: Groups, rank: int, weight: Weight) -> str | None:
    """The use over which this rank's shard of a parameter is summed."""
    here, place = contributors(weight.shared, weight.stages, layout, rank), groups["grads"]
    if layout.config.zero.stage:
        here = tuple(r for r in here if place[r].index(r) == place[rank].index(rank))
    if len(here) == 1:
        return None
    return next(use for use in GRADIENT_GROUPS if use in groups and groups[use].get(rank) == here)


def _chunk(layout: Layout, stage: int, weight: Weight) -> int:
    """The chunk whose backward is the last that adds to a gradient."""
    if layout.schedule is None:
        return 0
    index, parts = block_of(weight.name), layout.chunks(stage)
    if index != ROOT:
        return next(chunk for chunk, part in enumerate(parts) if index in part.layers)
    tied = layout.config.model.tie_embeddings
    first = weight.name.startswith("model.embed_tokens")
    using = [c for c, part in enumerate(parts) if (part.first and first) or (part.last and (tied or not first))]
    return min(using, key=lambda chunk: layout.schedule.position(stage, chunk))


def kept(layout: Layout, stage: int, found: Sequence[Row], place: int) -> states.ModelStates:
    """What a rank of a stage has before an update. place: the rank's index in its sharding group.

    Moments have no padding. AdamW counts its steps for every parameter, in float32.
    """
    optim, policy, every = layout.config.optim, layout.policy, weights(layout, stage)
    dimensions = {weight.name: weight.dimensions for weight in every}
    if apart(layout):
        elements = {name: stop - start for row in found for name, (start, stop) in row.layout.held(place).items()}
        rows = [states.Row(row.layout.numel, row.layout.shard, 0) for row in found]
        plain = states.model_states(rows, layout.config.zero, policy)
    else:
        elements = {weight.name: weight.numel for weight in every}
        whole, uses = sum(elements.values()), len(every) if layout.config.comm.gradients == "bucketed" else 0
        each = PRECISION_BYTES[policy.parameter]
        plain = states.ModelStates(whole * each, (whole + uses) * each, 0, 0)
    moments = 0
    for name, numel in elements.items():
        of = states.moments_of(optim, hidden_matrix=is_hidden_matrix(name, dimensions[name]))
        moments += numel * of * PRECISION_BYTES[policy.state] + (PRECISION_BYTES["fp32"] if of == 2 else 0)
    return dataclasses.replace(plain, moments=moments)


def messages(layout: Layout, found: Sequence[Row], stage: int) -> Counter[Operation]:
    """What a rank sends in a step for gradients and parameters: (use, operation, elements, bytes of an element)."""
    zero, policy, sent = layout.config.zero, layout.policy, Counter()
    reduce, parameter = PRECISION_BYTES[policy.reduce], PRECISION_BYTES[policy.parameter]
    rounds = layout.config.train.micro_batches if zero.shares_gradients else 1
    gathered = _gathers(layout, stage) if zero.stage == 3 else Counter({ROOT: 1})
    for row in found:
        if zero.stage:
            sent["grads", "reduce_scatter", row.layout.numel, reduce] += rounds
            sent["grads", "all_gather", row.layout.numel, parameter] += gathered[row.block]
        if row.outer is not None:
            sent[row.outer, "all_reduce", row.layout.shard, reduce] += 1
    return sent


def _gathers(layout: Layout, stage: int) -> Counter[int]:
    """How often each block of a stage is gathered in a step."""
    parts, schedule, config = layout.chunks(stage), layout.schedule, layout.config
    if schedule is None:
        passes = [op for _ in range(config.train.micro_batches) for op in (("F", 0), ("B", 0), ("end", 0))]
    else:
        halved = schedule.splits_backward
        passes = []
        for op in schedule.orders[stage]:
            passes += [(op.kind, op.chunk)] if op.kind != "W" else []
            passes += [("end", op.chunk)] if op.kind == ("W" if halved else "B") else []
    ends: Mapping[int, tuple[bool, bool]] = {chunk: (part.first, part.last) for chunk, part in enumerate(parts)}
    return gathers(passes, [part.layers for part in parts], ends, config.zero.keep_last_block)
