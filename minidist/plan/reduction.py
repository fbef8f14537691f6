"""Which gradients travel together, and over which ranks they are summed."""

from collections.abc import Iterable, Mapping, Sequence

from minidist.mesh import Mesh
from minidist.plan.layout import BYTES, Layout
from minidist.plan.states import Weight, weights
from minidist.roles import REDUCING, ranks_at

MIB = 2**20
_FIRST_BYTES = MIB  # of the first bucket at most, as in `parallel/buckets`

# By the name of a use, the group of every rank that has one.
Groups = Mapping[str, Mapping[int, Sequence[int]]]


def use_of(weight: Weight, layout: Layout, groups: Groups, rank: int) -> str:
    """The use over whose ranks the gradient of a weight of this rank is summed: those that contribute to it."""
    own, size = layout.mesh.coords(rank)["tp"], layout.mesh.tp
    tensor: Iterable[int] = (own,)
    if weight.shared == "tokens" and layout.sequence > 1:
        tensor = range(size)
    heads = layout.config.model.num_kv_heads
    if weight.shared == "head" and heads < size:
        each = size // heads
        tensor = range(own // each * each, own // each * each + each)
    contributors = ranks_at(layout.mesh, weight.stages, tuple(tensor))
    return next(use for use in REDUCING if use in groups and groups[use].get(rank) == contributors)


def messages(layout: Layout, groups: Groups, rank: int) -> list[tuple[str, int, int]]:
    """All-reduces of a step's gradients on this rank: (use, elements, bytes of an element).

    In buckets, the last of which ends in one element per parameter; or naively one by one, each with a number that says
    whether anybody used it.
    """
    comm, each = layout.config.comm, BYTES[layout.dtype]
    by_use: dict[str, list[int]] = {}
    for weight in reversed(weights(layout, layout.mesh.coords(rank)["pp"])):
        by_use.setdefault(use_of(weight, layout, groups, rank), []).append(weight.numel)
    found = []
    for use, sizes in by_use.items():
        if comm.gradients == "naive":
            found += [(use, numel, each) for numel in sizes] + [(use, 1, BYTES["float32"])] * len(sizes)
            continue
        filled = buckets(sizes, int(comm.bucket_mib * MIB) // each, _FIRST_BYTES // each)
        filled[-1] += len(sizes)
        found += [(use, elements, each) for elements in filled]
    return found


def buckets(sizes: Sequence[int], limit: int, first: int) -> list[int]:
    """How full buckets are when each takes the next as long as it fits: the rule of `parallel.buckets.assign`."""
    filled: list[int] = []
    for size in sizes:
        room = limit if len(filled) > 1 else min(first, limit)
        if filled and filled[-1] + size <= room:
            filled[-1] += size
        else:
            filled.append(size)
    return filled


def group_of(mesh: Mesh, partition: Iterable[Sequence[int]]) -> dict[int, Sequence[int]]:
    """The group of every rank that is in one."""
    return {rank: group for group in partition for rank in group}
