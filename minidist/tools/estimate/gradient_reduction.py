"""Which ranks sum a parameter's gradient, and in which buckets (without ZeRO)."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from minidist.parallel.data.assignment import FIRST_BYTES, MIB, assign_buckets
from minidist.process_groups import GRADIENT_GROUPS, ranks_with, replica_dp_coords
from minidist.tools.estimate.layout import DTYPE_BYTES, RunLayout
from minidist.tools.estimate.states import LocalParameter, TPSumRule, local_parameters

# The name of a group spec -> each rank that is in a process group of it -> the ranks of that group.
RanksByGroup = Mapping[str, Mapping[int, Sequence[int]]]


class GradientAllReduce(NamedTuple):
    """One all-reduce of gradients.

    group: the name of the group spec (the declaration of process groups for one purpose) over which it runs. numel: the
    number of elements. element_bytes: bytes per element.
    """

    group: str
    numel: int
    element_bytes: int


def contributing_ranks(tp_sum_rule: TPSumRule, stages: Sequence[int], layout: RunLayout, rank: int) -> tuple[int, ...]:
    """Return the global ranks whose local gradients of a parameter are summed, `rank` included.

    tp_sum_rule: which tensor-parallel ranks are among them (`states.TPSumRule`). stages: the pipeline stages that have
    the parameter; two for a tied embedding.
    """
    own, size = layout.mesh.coords(rank)["tp"], layout.mesh.tp
    tensor: Iterable[int] = (own,)
    if tp_sum_rule == "sequence_parallel" and layout.sequence_parallel_size > 1:
        tensor = range(size)
    heads = layout.config.model.num_kv_heads
    if tp_sum_rule == "kv_head_replicas" and heads < size:
        replicas = size // heads
        first = own // replicas * replicas
        tensor = range(first, first + replicas)
    return ranks_with(layout.mesh, stages, replica_dp_coords(layout.mesh, layout.config, rank), tuple(tensor))


def _find_reduction_group(
    tp_sum_rule: TPSumRule, stages: Sequence[int], layout: RunLayout, ranks_by_group: RanksByGroup, rank: int
) -> str:
    """The name of the group spec whose process group of `rank` has exactly the ranks that `contributing_ranks`
    returns."""
    ranks = contributing_ranks(tp_sum_rule, stages, layout, rank)
    return next(spec for spec in GRADIENT_GROUPS if spec in ranks_by_group and ranks_by_group[spec].get(rank) == ranks)


def list_gradient_all_reduces(layout: RunLayout, ranks_by_group: RanksByGroup, rank: int) -> list[GradientAllReduce]:
    """Return the all-reduces of gradients that `rank` takes part in during a step without ZeRO.

    `comm.gradients` "bucketed": one all-reduce per bucket; the last bucket of a process group ends with one element per
    parameter, which counts the ranks that used the parameter. "naive": two all-reduces per parameter, one of the
    gradient and one of the count, a single float32 element. ranks_by_group: the process groups of every group spec
    (`RanksByGroup`).
    """
    comm, element_bytes = layout.config.comm, DTYPE_BYTES[layout.dtype]
    group_of = cache(
        lambda tp_sum_rule, stages: _find_reduction_group(tp_sum_rule, stages, layout, ranks_by_group, rank)
    )
    by_group: dict[str, list[LocalParameter]] = {}
    for parameter in reversed(local_parameters(layout, layout.mesh.coords(rank)["pp"])):
        by_group.setdefault(group_of(parameter.tp_sum_rule, parameter.stages), []).append(parameter)
    all_reduces = []
    for spec, parameters in by_group.items():
        sizes = {parameter.name: parameter.numel for parameter in parameters}
        if comm.gradients == "naive":
            all_reduces += [GradientAllReduce(spec, numel, element_bytes) for numel in sizes.values()]
            all_reduces += [GradientAllReduce(spec, 1, DTYPE_BYTES["float32"])] * len(sizes)
            continue
        in_bytes = {name: numel * element_bytes for name, numel in sizes.items()}
        buckets = assign_buckets(in_bytes, int(comm.bucket_mib * MIB), FIRST_BYTES)
        elements = [sum(sizes[name] for name in bucket) for bucket in buckets]
        elements[-1] += len(sizes)
        all_reduces += [GradientAllReduce(spec, numel, element_bytes) for numel in elements]
    return all_reduces


def map_ranks_to_groups(rank_groups: Iterable[Sequence[int]]) -> dict[int, Sequence[int]]:
    """Return {rank: the ranks of its process group}. rank_groups: the ranks of every group."""
    return {rank: group for group in rank_groups for rank in group}
