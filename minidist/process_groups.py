"""The process groups of a layout, and the layers of its pipeline stages. Does not import torch."""

import dataclasses
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from minidist.comm.group_specs import GroupSpec
from minidist.config import Config
from minidist.mesh import AXES, Mesh
from minidist.models.config import ModelConfig
from minidist.parallel.pipeline.actions import Schedule
from minidist.parallel.pipeline.balance import balance_layers
from minidist.parallel.pipeline.schedules import pipeline_schedule

# The groups of every layout. "grads": the replicas of a parameter that process different tokens; under ZeRO, those over
# which it is sharded. "loss": the ranks that process different tokens.
DEFAULT_GROUP_SPECS: Sequence[GroupSpec] = (GroupSpec("grads", ("dp", "cp")), GroupSpec("loss", ("dp", "cp")))

# The groups over which gradients are summed. A parameter uses the first whose ranks are its contributors; under ZeRO
# its shard uses "grads", and also the group of the ranks that hold the same shard.
GRADIENT_GROUPS = ("grads", "shard_replicas", "norms", "heads", "tied")


def group_specs(mesh: Mesh, config: Config) -> list[GroupSpec]:
    """Return the specs of all process groups that `config` needs on `mesh`; a mesh axis of size 1 needs none.

    If replicas train separately (local SGD, DiLoCo, gossip, asynchronous workers), two groups are added: "replica", all
    ranks of one replica, and "outer", the ranks at the same position in each replica. Every other group then lies
    inside a replica.
    """
    each = config.replica_mesh(mesh).dp
    specs = _replica_group_specs(config.replica_mesh(mesh), config)
    if not (config.consistency.merges_replicas or config.consistency.is_asynchronous):
        return specs
    replicas = tuple(tuple(range(first, first + each)) for first in range(0, mesh.dp, each))
    return [
        *(_repeat_in_each_replica(spec, replicas) for spec in specs),
        GroupSpec("replica", AXES, (("dp", replicas),)),
        GroupSpec("outer", ("dp",), (("dp", tuple(zip(*replicas, strict=True))),)),
    ]


def _repeat_in_each_replica(spec: GroupSpec, replicas: Sequence[Sequence[int]]) -> GroupSpec:
    """Return `spec`, whose groups lie in the first replica, with the same groups in every replica.

    replicas: the dp coordinates of each replica.
    """
    if "dp" not in spec.axes:
        return spec
    partitions = dict(spec.axis_partitions)
    sets = partitions.get("dp", (replicas[0],))
    partitions["dp"] = tuple(tuple(replica[at] for at in some) for replica in replicas for some in sets)
    return dataclasses.replace(spec, axis_partitions=tuple(partitions.items()))


def _replica_group_specs(mesh: Mesh, config: Config) -> list[GroupSpec]:
    """Return the specs of all process groups inside a replica. mesh: the mesh of one replica."""
    shard_spec, replica_spec = _gradient_group_specs(mesh, config)
    specs = [shard_spec, *DEFAULT_GROUP_SPECS[1:]]
    if config.zero.stage and replica_spec.axes:
        specs.append(replica_spec)
    if mesh.tp > 1:
        specs.append(GroupSpec("tensor", ("tp",)))
        specs += _partial_gradient_specs(mesh.tp, config, replica_spec)
    if config.optim.kind == "muon":
        specs += _matrix_group_specs(mesh, config, shard_spec)
    if mesh.cp > 1:
        specs.append(GroupSpec("context", ("cp",)))
    if mesh.pp > 1:
        specs += [GroupSpec("activations", ("pp",)), GroupSpec("gradients", ("pp",))]
        both = first_and_last_stages(pipeline_schedule(config, mesh))
        if config.model.tie_embeddings and len(both) > 1:
            specs.append(
                GroupSpec("tied", ("pp", *replica_spec.axes), (("pp", (both,)), *replica_spec.axis_partitions))
            )
    return specs


def _gradient_group_specs(mesh: Mesh, config: Config) -> tuple[GroupSpec, GroupSpec]:
    """Return two specs: the group over which ZeRO shards gradients, and the group of the replicas of a shard.

    Without ZeRO nothing is sharded: both groups have all ranks that process different tokens.
    """
    if config.zero.stage == 0:
        return DEFAULT_GROUP_SPECS[0], GroupSpec("shard_replicas", DEFAULT_GROUP_SPECS[0].axes)
    inner = config.zero.shard_group_size(mesh) // mesh.cp  # dp ranks per shard group
    if inner == mesh.dp:
        return DEFAULT_GROUP_SPECS[0], GroupSpec("shard_replicas", ())
    shard_sets = tuple(tuple(range(first, first + inner)) for first in range(0, mesh.dp, inner))
    replica_sets = tuple(zip(*shard_sets, strict=True))
    return GroupSpec("grads", DEFAULT_GROUP_SPECS[0].axes, (("dp", shard_sets),)), GroupSpec(
        "shard_replicas", ("dp",), (("dp", replica_sets),)
    )


def _matrix_group_specs(mesh: Mesh, config: Config, shard_spec: GroupSpec) -> list[GroupSpec]:
    """Return, for Muon, the spec of the group over which ZeRO or tensor parallelism shards a matrix, if one does.

    shard_spec: the group over which ZeRO shards gradients.
    """
    sharded = config.zero.shard_group_size(mesh) > 1
    axes = (*(shard_spec.axes if sharded else ()), *(("tp",) if mesh.tp > 1 else ()))
    return [GroupSpec("matrices", axes, shard_spec.axis_partitions if sharded else ())] if axes else []


def _partial_gradient_specs(tp: int, config: Config, replica_spec: GroupSpec) -> list[GroupSpec]:
    """Return the specs of the groups that sum gradients of which several tp ranks hold partial sums.

    tp: number of tensor-parallel ranks. replica_spec: the ranks that hold the same shard, over which the groups extend.
    """
    specs = []
    axes = (*replica_spec.axes, "tp")
    if config.parallel.sequence:
        specs.append(GroupSpec("norms", axes, replica_spec.axis_partitions))
    heads = config.model.num_kv_heads
    if heads < tp and not (heads == 1 and config.parallel.sequence):  # with one head its ranks are those of "norms"
        each = tp // heads
        sets = tuple(tuple(range(head * each, (head + 1) * each)) for head in range(heads))
        specs.append(GroupSpec("heads", axes, (*replica_spec.axis_partitions, ("tp", sets))))
    return specs


def first_and_last_stages(schedule: Schedule) -> tuple[int, ...]:
    """Return the stages that hold the first and the last model chunk, ascending; one stage if it holds both."""
    return tuple(sorted({schedule.owner(0)[0], schedule.owner(schedule.num_parts - 1)[0]}))


def assign_layers(model: ModelConfig, schedule: Schedule, seq_len: int) -> list[range]:
    """Return the range of layers of each model chunk, from the input on, balanced by FLOPs per token.

    `schedule` says how many chunks each stage has. The FLOPs of the output head count for the last chunk.
    """
    flops = forward_flops_per_token(model, seq_len)
    layers = [flops.layer_weights + flops.layer_attention] * model.num_layers
    return balance_layers(layers, schedule.num_stages, schedule.num_chunks, head=flops.head)


class ForwardFlopsPerToken(NamedTuple):
    """FLOPs of forward per token: of a layer's weights, of its attention's two products, and of the output head."""

    layer_weights: int
    layer_attention: int
    head: int


def forward_flops_per_token(model: ModelConfig, seq_len: int) -> ForwardFlopsPerToken:
    """Return the FLOPs of forward per token: 2 per weight, and 4 * hidden_size * seq_len for attention per layer."""
    h, kv = model.hidden_size, model.num_kv_heads * model.head_dim
    weights = 2 * (2 * h * h + 2 * h * kv + 3 * h * model.intermediate_size)
    return ForwardFlopsPerToken(weights, 4 * h * seq_len, 2 * h * model.vocab_size)


def replica_dp_coords(mesh: Mesh, config: Config, rank: int) -> range:
    """Return the dp coordinates of the ranks that train together with `rank`: its replica's ranks, or all."""
    each = config.replica_mesh(mesh).dp
    first = mesh.coords(rank)["dp"] // each * each
    return range(first, first + each)


def ranks_with(
    mesh: Mesh, pp_coords: Sequence[int], dp_coords: Sequence[int], tp_coords: Sequence[int]
) -> tuple[int, ...]:
    """Return all ranks of `mesh` with these pp, dp and tp coordinates, whatever their cp coordinate; ascending."""
    places = product(sorted(pp_coords), dp_coords, range(mesh.cp), sorted(tp_coords))
    return tuple(mesh.rank(**dict(zip(AXES, place, strict=True))) for place in places)


def is_hidden_matrix(name: str, ndim: int) -> bool:
    """Return whether Muon updates a parameter: it is a matrix of a layer, neither the embedding nor the head.

    name: global name of the parameter. ndim: number of its dimensions.
    """
    return ndim == 2 and ".layers." in name
