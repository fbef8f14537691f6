"""Which ranks sum a parameter's gradient, and in which buckets (without ZeRO)."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from minidist.process_groups import GRADIENT_GROUPS, ranks_at
from minidist.tools.estimate.layout import DTYPE_BYTES, Layout
from minidist.tools.estimate.states import weights

MIB = 2**20
FIRST_BUCKET_BYTES = MIB  # upper limit of the first bucket, as in `parallel/data/buckets`

# The process group of every rank that is in one, by the name of the group spec.
Groups = Mapping[str, Mapping[int, Sequence[int]]]


def contributors(shared: str, stages: Sequence[int], layout: Layout, rank: int) -> tuple[int, ...]:
    """The ranks whose local gradients of a parameter are summed with this rank's.

    shared: which tensor-parallel ranks contribute (`states.LAYER`); stages: the pipeline stages that have the
    parameter.
    """
    own, size = layout.mesh.coords(rank)["tp"], layout.mesh.tp
    tensor: Iterable[int] = (own,)
    if shared == "tokens" and layout.sequence_parallel_size > 1:
        tensor = range(size)
    heads = layout.config.model.num_kv_heads
    if shared == "head" and heads < size:
        replicas = size // heads
        tensor = range(own // replicas * replicas, own // replicas * replicas + replicas)
    return ranks_at(layout.mesh, stages, tuple(tensor))


def find_reduction_group(shared: str, stages: Sequence[int], layout: Layout, groups: Groups, rank: int) -> str:
    """The name of the group spec whose ranks are exactly the contributors to this rank's gradient."""
    wanted = contributors(shared, stages, layout, rank)
    return next(name for name in GRADIENT_GROUPS if name in groups and groups[name].get(rank) == wanted)


def list_gradient_all_reduces(layout: Layout, groups: Groups, rank: int) -> list[tuple[str, int, int]]:
    """The all-reduces of a step's gradients on this rank: (group spec, elements, bytes per element).

    Bucketed: the last bucket ends with one element per parameter, which says whether the parameter was used. Naive: one
    all-reduce per parameter, each followed by one of that single element.
    """
    comm, each = layout.config.comm, DTYPE_BYTES[layout.dtype]
    by_group: dict[str, list[int]] = {}
    group_of = cache(lambda shared, stages: find_reduction_group(shared, stages, layout, groups, rank))
    for weight in reversed(weights(layout, layout.mesh.coords(rank)["pp"])):
        by_group.setdefault(group_of(weight.shared, weight.stages), []).append(weight.numel)
    found = []
    for name, sizes in by_group.items():
        if comm.gradients == "naive":
            found += [(name, numel, each) for numel in sizes] + [(name, 1, DTYPE_BYTES["float32"])] * len(sizes)
            continue
        filled = fill_buckets(sizes, int(comm.bucket_mib * MIB) // each, FIRST_BUCKET_BYTES // each)
        filled[-1] += len(sizes)
        found += [(name, elements, each) for elements in filled]
    return found


def fill_buckets(sizes: Sequence[int], limit: int, first_limit: int | None = None) -> list[int]:
    """The size of each bucket when parameters are added in order while they fit, as DDP and `parallel/data/buckets` do.

    limit: of every bucket but the first, which has `first_limit` if given.
    """
    filled: list[int] = []
    for size in sizes:
        room = limit if len(filled) > 1 or first_limit is None else min(first_limit, limit)
        if filled and filled[-1] + size <= room:
            filled[-1] += size
        else:
            filled.append(size)
    return filled


def group_by_rank(partition: Iterable[Sequence[int]]) -> dict[int, Sequence[int]]:
    """The group of every rank that is in one."""
    return {rank: group for group in partition for rank in group}
