"""The host memory of a save in the background: the copies that a rank makes of the tensors that it writes."""

import zlib
from collections.abc import Iterator

from minidist.precision.policy import PRECISION_BYTES
from minidist.process_groups import is_hidden_matrix, ranks_with, replica_dp_coords
from minidist.tools.estimate.layout import DTYPE_BYTES, Layout
from minidist.tools.estimate.shards import uses_flat_params
from minidist.tools.estimate.states import (
    LocalParameter,
    local_parameters,
    moments_per_element,
    outer_bytes_per_element,
)
from minidist.tools.estimate.traffic import Traffic


def checkpoint_copy_bytes(layout: Layout, traffic: Traffic, rank: int) -> int:
    """Return the bytes of host memory that this rank keeps for saving checkpoints in the background.

    They hold the copies of its tensors that `CheckpointSaver` writes while training goes on; 0 without
    `checkpoint.background`. A rank copies the tensors that it saves: parameters or master weights, moments, and AdamW's
    step count, which is saved with a parameter's first elements. If several ranks have replicas of a tensor, only one
    of them saves it (`ParamSpec.owner`).
    """
    if not layout.config.checkpoint.background:
        return 0
    policy, outer_bytes, total = layout.policy, 0, 0
    coords, replicas = layout.mesh.coords(rank), layout.config.num_replicas(layout.mesh)
    if coords["dp"] < layout.mesh.dp // replicas:  # the outer state is equal in all replicas, and the first saves it
        outer_bytes = outer_bytes_per_element(layout.config.consistency, policy)
    if layout.config.consistency.merges_replicas and traffic.group_ranks("replica", rank)[0] == rank:
        total += DTYPE_BYTES["float64"]  # the number of tokens since the last merge
    parameter_bytes = PRECISION_BYTES[policy.master if policy.separate_masters else policy.parameter]
    for parameter, start, stop in _local_ranges(layout, traffic, rank):
        holders = _replicas(layout, traffic, parameter, rank)
        if holders[zlib.crc32(parameter.name.encode()) % len(holders)] != rank:
            continue
        matrix = is_hidden_matrix(parameter.name, parameter.dimensions)
        moments = moments_per_element(layout.config.optim, hidden_matrix=matrix)
        total += (stop - start) * (parameter_bytes + moments * PRECISION_BYTES[policy.state] + outer_bytes)
        if moments == 2 and start == 0 and min(_tensor_ranks(layout, parameter, rank)) == 0:
            total += PRECISION_BYTES["fp32"]
    return total


def _local_ranges(layout: Layout, traffic: Traffic, rank: int) -> Iterator[tuple[LocalParameter, int, int]]:
    """Yield each parameter and the range of its local elements that this rank updates."""
    parameters = {parameter.name: parameter for parameter in local_parameters(layout, layout.mesh.coords(rank)["pp"])}
    if not uses_flat_params(layout):
        yield from ((parameter, 0, parameter.numel) for parameter in parameters.values())
        return
    for flat in traffic.flat_params(rank):
        for name, (start, stop) in flat.layout.param_ranges(traffic.shard_index(rank)).items():
            yield parameters[name], start, stop


def _replicas(layout: Layout, traffic: Traffic, parameter: LocalParameter, rank: int) -> list[int]:
    """The ranks that hold the same elements of a parameter, ascending, this rank included."""
    dp_coords = replica_dp_coords(layout.mesh, layout.config, rank)
    holders = ranks_with(layout.mesh, parameter.stages, dp_coords, tuple(_tensor_ranks(layout, parameter, rank)))
    return [other for other in holders if traffic.shard_index(other) == traffic.shard_index(rank)]


def _tensor_ranks(layout: Layout, parameter: LocalParameter, rank: int) -> range:
    """The coordinates along tp that hold the same elements of a parameter, this rank's included."""
    own, size, heads = layout.mesh.coords(rank)["tp"], layout.mesh.tp, layout.config.model.num_kv_heads
    if parameter.dimensions == 1:
        return range(size)
    replicas = max(1, size // heads) if parameter.tp_sum_rule == "kv_head_replicas" else 1
    return range(own // replicas * replicas, own // replicas * replicas + replicas)
