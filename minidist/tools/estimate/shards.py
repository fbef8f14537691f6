"""The flat parameters of a layout, for ZeRO or for master weights, and the collectives that reduce and gather them.

A flat parameter is one buffer in which the parameters of a layer are concatenated, so that ZeRO can cut it into equal
shards. `zero.plan` plans the flat parameters, for the trainer and for the estimate.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from minidist.parallel.data.assignment import MIB
from minidist.precision.policy import PRECISION_BYTES
from minidist.process_groups import GRADIENT_GROUPS, is_hidden_matrix
from minidist.tools.estimate import states
from minidist.tools.estimate.gathers import count_all_gathers
from minidist.tools.estimate.gradient_reduction import RanksByGroup, contributing_ranks
from minidist.tools.estimate.layout import RunLayout
from minidist.tools.estimate.states import LocalParameter, local_parameters
from minidist.zero.plan import ROOT, FlatLayout, block_index, plan_flat_params

# (group spec, operation, elements as `comm/wire_bytes` counts them, bytes per element)
Operation = tuple[str, str, int, int]


@dataclass(frozen=True)
class LocalFlatParam:
    """A flat parameter of one rank: a buffer in which parameters are concatenated, so that ZeRO can shard it evenly.

    layout: its parameters and shards (`zero.plan`). replica_group: the name of the group spec over which ranks that
    have the same shard sum its gradient; None if no other rank has the shard. chunk: the index, among the rank's
    model chunks, of the one whose backward completes the gradients. block: the number of the layer with which ZeRO-3
    gathers the flat parameter, or ROOT for parameters outside of all layers.
    """

    layout: FlatLayout
    replica_group: str | None
    chunk: int
    block: int


def uses_flat_params(layout: RunLayout) -> bool:
    """Return whether the run flattens its parameters: if ZeRO is on, or dtypes differ between kinds of tensors."""
    return layout.config.zero.stage > 0 or not layout.policy.uniform


def plan_local_flat_params(layout: RunLayout, ranks_by_group: RanksByGroup, rank: int) -> list[LocalFlatParam]:
    """Return the flat parameters of global rank `rank`, in the order in which backward completes their gradients.

    ranks_by_group: the process groups of every group spec (`RanksByGroup`).
    """
    stage, config = layout.mesh.coords(rank)["pp"], layout.config
    parameters = {parameter.name: parameter for parameter in local_parameters(layout, stage)}
    planned = plan_flat_params(
        {name: parameter.numel for name, parameter in parameters.items()},
        lambda name: (
            _replica_group(layout, ranks_by_group, rank, parameters[name]),
            _completing_chunk(layout, stage, parameters[name]),
        ),
        config.zero,
        config.zero.shard_group_size(layout.replica_mesh),
        int(config.comm.bucket_mib * MIB),
        PRECISION_BYTES[layout.policy.reduce],
    )
    return [LocalFlatParam(flat.layout, *flat.kind, flat.block) for flat in planned]


def _replica_group(layout: RunLayout, groups: RanksByGroup, rank: int, parameter: LocalParameter) -> str | None:
    """Return the group spec of the ranks that have the same shard of a parameter and add to its gradient.

    None if this rank is the only one.
    """
    shard_groups = groups["grads"]
    replicas = contributing_ranks(parameter.tp_sum_rule, parameter.stages, layout, rank)
    if layout.config.zero.stage:
        shard_index = shard_groups[rank].index(rank)
        replicas = tuple(other for other in replicas if shard_groups[other].index(other) == shard_index)
    if len(replicas) == 1:
        return None
    return next(spec for spec in GRADIENT_GROUPS if spec in groups and groups[spec].get(rank) == replicas)


def _completing_chunk(layout: RunLayout, stage: int, parameter: LocalParameter) -> int:
    """Return the chunk of the stage whose backward is the last to contribute to a parameter's gradient."""
    if layout.schedule is None:
        return 0
    block, chunks = block_index(parameter.name), layout.stage_chunks(stage)
    if block != ROOT:
        return next(number for number, chunk in enumerate(chunks) if block in chunk.layers)
    tied = layout.config.model.tie_embeddings
    embedding = parameter.name.startswith("model.embed_tokens")
    users = [
        number
        for number, chunk in enumerate(chunks)
        if (chunk.has_embedding and embedding) or (chunk.has_head and (tied or not embedding))
    ]
    return min(users, key=lambda chunk: layout.schedule.position(stage, chunk))


def local_model_states(
    layout: RunLayout, stage: int, flat_params: Sequence[LocalFlatParam], shard_index: int
) -> states.ModelStates:
    """Return the bytes of parameters, gradients, masters and optimizer states on one rank just before an update.

    stage: the rank's pipeline stage. flat_params: the rank's flat parameters, [] where parameters are not flattened.
    shard_index: the index of the ZeRO shard that the rank owns. Optimizer states are without padding, with AdamW's step
    counters, one float32 number per parameter.
    """
    optim, policy, parameters = layout.config.optim, layout.policy, local_parameters(layout, stage)
    dimensions = {parameter.name: parameter.dimensions for parameter in parameters}
    if uses_flat_params(layout):
        owned = {
            name: stop - start
            for flat in flat_params
            for name, (start, stop) in flat.layout.param_ranges(shard_index).items()
        }
        sizes = [states.FlatParamSize(flat.layout.numel, flat.layout.shard_numel, 0) for flat in flat_params]
        without_moments = states.model_states(sizes, layout.config.zero, policy)
    else:
        owned = {parameter.name: parameter.numel for parameter in parameters}
        # Buckets end with an element per parameter that reports whether the parameter was used.
        reports = 0 if layout.config.comm.gradients == "naive" else len(parameters)
        numel, element_bytes = sum(owned.values()), PRECISION_BYTES[policy.parameter]
        without_moments = states.ModelStates(numel * element_bytes, (numel + reports) * element_bytes, 0, 0)
    consistency, owned_numel = layout.config.consistency, sum(owned.values())
    moment_bytes = owned_numel * states.outer_bytes_per_element(consistency, policy)
    moment_bytes += owned_numel * states.error_bytes_per_element(consistency, policy)
    for name, numel in owned.items():
        moments = states.moments_per_element(optim, hidden_matrix=is_hidden_matrix(name, dimensions[name]))
        step_counter = PRECISION_BYTES["fp32"] if moments == 2 else 0
        moment_bytes += numel * moments * PRECISION_BYTES[policy.state] + step_counter
    return dataclasses.replace(without_moments, moments=moment_bytes)


def flat_param_operations(
    layout: RunLayout, flat_params: Sequence[LocalFlatParam], pipeline_stage: int
) -> Counter[Operation]:
    """Return how often a rank runs each collective that reduces flat gradients or gathers flat parameters in a step.

    flat_params, pipeline_stage: of the rank. The keys are `Operation`: (group spec, operation, elements, bytes per
    element).
    """
    zero, policy, operations = layout.config.zero, layout.policy, Counter()
    reduce, parameter = PRECISION_BYTES[policy.reduce], PRECISION_BYTES[policy.parameter]
    reductions = layout.config.train.micro_batches if zero.shards_gradients else 1
    all_gathers = _count_all_gathers(layout, pipeline_stage) if zero.stage == 3 else Counter({ROOT: 1})
    for flat in flat_params:
        if zero.stage:
            operations["grads", "reduce_scatter", flat.layout.numel, reduce] += reductions
            operations["grads", "all_gather", flat.layout.numel, parameter] += all_gathers[flat.block]
        if flat.replica_group is not None:
            operations[flat.replica_group, "all_reduce", flat.layout.shard_numel, reduce] += 1
    return operations


def _count_all_gathers(layout: RunLayout, stage: int) -> Counter[int]:
    """Count how often ZeRO-3 gathers each block of a pipeline stage in a step."""
    chunks, schedule, config = layout.stage_chunks(stage), layout.schedule, layout.config
    if schedule is None:
        actions = [op for _ in range(config.train.micro_batches) for op in (("F", 0), ("B", 0), ("end", 0))]
    else:
        actions = []
        for op in schedule.orders[stage]:
            actions += [(op.kind, op.chunk)] if op.kind != "W" else []
            actions += [("end", op.chunk)] if op.kind == schedule.last_action_kind else []
    ends = [(chunk.has_embedding, chunk.has_head) for chunk in chunks]
    return count_all_gathers(actions, [chunk.layers for chunk in chunks], ends, config.zero.keep_last_block)
