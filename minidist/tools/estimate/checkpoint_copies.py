"""The host memory of a save in the background: the copies that a rank makes of the tensors that it writes."""

import zlib

from minidist.precision.policy import PRECISION_BYTES
from minidist.process_groups import is_hidden_matrix
from minidist.tools.estimate.layout import DTYPE_BYTES, RunLayout
from minidist.tools.estimate.states import (
    error_bytes_per_element,
    moments_per_element,
    outer_bytes_per_element,
    replica_tp_coords,
)
from minidist.tools.estimate.traffic import Traffic


def checkpoint_copy_bytes(layout: RunLayout, traffic: Traffic, rank: int) -> int:
    """Return the bytes of host memory that this rank keeps for saving checkpoints in the background.

    They hold the copies of its tensors that `CheckpointSaver` writes while training goes on; 0 without
    `checkpoint.background`. A rank copies the tensors that it saves: parameters or master weights, moments, and AdamW's
    step count, which is saved with a parameter's first elements. If several ranks have replicas of a tensor, only one
    of them saves it (`ParamSpec.owner`).
    """
    if not layout.config.checkpoint.background:
        return 0
    policy, total = layout.policy, 0
    merge_bytes = error_bytes_per_element(layout.config.consistency, policy)
    coords, replicas = layout.mesh.coords(rank), layout.config.num_replicas(layout.mesh)
    if coords["dp"] < layout.mesh.dp // replicas:  # the outer state is equal in all replicas, and the first saves it
        merge_bytes += outer_bytes_per_element(layout.config.consistency, policy)
    if layout.config.consistency.merges_replicas and traffic.group_ranks("replica", rank)[0] == rank:
        total += DTYPE_BYTES["float64"]  # the number of tokens since the last merge
    parameter_bytes = PRECISION_BYTES[policy.master if policy.separate_masters else policy.parameter]
    for parameter, start, stop in traffic.local_ranges(rank):
        holders = traffic.replicas(parameter, rank)
        if holders[zlib.crc32(parameter.name.encode()) % len(holders)] != rank:
            continue
        matrix = is_hidden_matrix(parameter.name, parameter.dimensions)
        moments = moments_per_element(layout.config.optim, hidden_matrix=matrix)
        total += (stop - start) * (parameter_bytes + moments * PRECISION_BYTES[policy.state] + merge_bytes)
        if moments == 2 and start == 0 and min(replica_tp_coords(layout, parameter, rank)) == 0:
            total += PRECISION_BYTES["fp32"]
    return total
