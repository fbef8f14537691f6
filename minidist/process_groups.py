"""Who does what in a layout: which stage has which layers, who talks to whom, who holds the same. Needs no torch."""

from collections.abc import Sequence
from itertools import product

from minidist.comm.group_specs import GroupSpec
from minidist.config import Config
from minidist.mesh import AXES, Mesh
from minidist.models.config import ModelConfig
from minidist.parallel.pipeline.actions import Schedule
from minidist.parallel.pipeline.balance import balance_layers
from minidist.parallel.pipeline.schedules import pipeline_schedule

# Who talks to whom in a step of every layout. "grads": replicas of a parameter that saw other tokens; under ZeRO those
# of them that share out its shards. "loss": ranks that see other tokens.
DEFAULT_GROUP_SPECS: Sequence[GroupSpec] = (GroupSpec("grads", ("dp", "cp")), GroupSpec("loss", ("dp", "cp")))

# The uses over which gradients are summed. A parameter takes the first whose ranks are those that contribute to it;
# under ZeRO its shard takes, besides "grads", the one whose ranks hold the same shard.
GRADIENT_GROUPS = ("grads", "copies", "norms", "heads", "tied")


def group_specs(mesh: Mesh, config: Config) -> list[GroupSpec]:
    """Who talks to whom in a step of this layout, and what for. What one axis needs is there when its size is not 1."""
    sharing, summing = _reduction(mesh, config)
    found = [sharing, *DEFAULT_GROUP_SPECS[1:]]
    if config.zero.stage and summing.axes:
        found.append(summing)
    if mesh.tp > 1:
        found.append(GroupSpec("tensor", ("tp",)))
        found += _summed_over_tensor(mesh.tp, config, summing)
    if config.optim.kind == "muon":
        found += _matrices(mesh, config, sharing)
    if mesh.cp > 1:
        found.append(GroupSpec("context", ("cp",)))
    if mesh.pp > 1:
        found += [GroupSpec("activations", ("pp",)), GroupSpec("gradients", ("pp",))]
        both = first_and_last_stages(pipeline_schedule(config, mesh))
        if config.model.tie_embeddings and len(both) > 1:
            found.append(GroupSpec("tied", ("pp", *summing.axes), (("pp", (both,)), *summing.subgroups)))
    return found


def _reduction(mesh: Mesh, config: Config) -> tuple[GroupSpec, GroupSpec]:
    """Who shares out the gradients of a parameter, and who, of those that saw other tokens, sums the same.

    Without ZeRO all replicas sum the same, and nobody shares anything out.
    """
    if config.zero.stage == 0:
        return DEFAULT_GROUP_SPECS[0], GroupSpec("copies", DEFAULT_GROUP_SPECS[0].axes)
    inner = config.zero.shard_group_size(mesh) // mesh.cp  # places on the dp axis that share
    if inner == mesh.dp:
        return DEFAULT_GROUP_SPECS[0], GroupSpec("copies", ())
    sharing = tuple(tuple(range(first, first + inner)) for first in range(0, mesh.dp, inner))
    copies = tuple(zip(*sharing, strict=True))
    return GroupSpec("grads", DEFAULT_GROUP_SPECS[0].axes, (("dp", sharing),)), GroupSpec(
        "copies", ("dp",), (("dp", copies),)
    )


def _matrices(mesh: Mesh, config: Config, sharing: GroupSpec) -> list[GroupSpec]:
    """The ranks over which a matrix is sharded, by ZeRO or tensor parallelism: Muon exchanges it among them."""
    sharded = config.zero.shard_group_size(mesh) > 1
    axes = (*(sharing.axes if sharded else ()), *(("tp",) if mesh.tp > 1 else ()))
    return [GroupSpec("matrices", axes, sharing.subgroups if sharded else ())] if axes else []


def _summed_over_tensor(tp: int, config: Config, summing: GroupSpec) -> list[GroupSpec]:
    """Gradients that are parts of a sum on several ranks of the tp axis, as on those of `summing`."""
    found, axes = [], (*summing.axes, "tp")
    if config.parallel.sequence:
        found.append(GroupSpec("norms", axes, summing.subgroups))
    heads = config.model.num_kv_heads
    if heads < tp and not (heads == 1 and config.parallel.sequence):  # one head for all is the same ranks
        each = tp // heads
        sets = tuple(tuple(range(head * each, (head + 1) * each)) for head in range(heads))
        found.append(GroupSpec("heads", axes, (*summing.subgroups, ("tp", sets))))
    return found


def first_and_last_stages(schedule: Schedule) -> tuple[int, ...]:
    """The stages of the first and of the last part of the model, ascending; one, where both are on the same."""
    return tuple(sorted({schedule.owner(0)[0], schedule.owner(schedule.positions - 1)[0]}))


def assign_layers(model: ModelConfig, schedule: Schedule, seq_len: int) -> list[range]:
    """The layers of each part of the model, balanced by what a token costs: a head can cost as much as many layers."""
    weights, attention, head = forward_flops(model, seq_len)
    return balance_layers([weights + attention] * model.num_layers, schedule.stages, schedule.chunks, head=head)


def forward_flops(model: ModelConfig, seq_len: int) -> tuple[int, int, int]:
    """What a token costs forward: the weights of a layer, the two products of its attention, and the head.

    In floating-point operations, multiplications and additions: 2 per weight, and 4 h s in attention.
    """
    h, kv = model.hidden_size, model.num_kv_heads * model.head_dim
    weights = 2 * (2 * h * h + 2 * h * kv + 3 * h * model.intermediate_size)
    return weights, 4 * h * seq_len, 2 * h * model.vocab_size


def ranks_at(mesh: Mesh, stages: Sequence[int], tensor: Sequence[int]) -> tuple[int, ...]:
    """All ranks, ascending, of these stages and, in each, of these places on the tp axis."""
    places = product(sorted(stages), range(mesh.dp), range(mesh.cp), sorted(tensor))
    return tuple(mesh.rank(**dict(zip(AXES, place, strict=True))) for place in places)


def is_hidden_matrix(name: str, dimensions: int) -> bool:
    """Whether a parameter is a matrix of a layer, which Muon is for: neither embedding nor head."""
    return dimensions == 2 and ".layers." in name
