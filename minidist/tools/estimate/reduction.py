"""Which gradients travel together, and over which ranks they are summed."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from minidist.mesh import Mesh
from minidist.process_groups import REDUCING, ranks_at
from minidist.tools.estimate.layout import BYTES, Layout
from minidist.tools.estimate.states import weights

MIB = 2**20
FIRST_BYTES = MIB  # of the first bucket at most, as in `parallel/buckets`

# By the name of a use, the group of every rank that has one.
Groups = Mapping[str, Mapping[int, Sequence[int]]]


def contributors(shared: str, stages: Sequence[int], layout: Layout, rank: int) -> tuple[int, ...]:
    """The ranks whose gradients of a parameter are parts of one sum with this rank's.

    shared: with whom of the tp axis the parameter's gradient is shared (`states.LAYER`); stages: that hold it.
    """
    own, size = layout.mesh.coords(rank)["tp"], layout.mesh.tp
    tensor: Iterable[int] = (own,)
    if shared == "tokens" and layout.sequence > 1:
        tensor = range(size)
    heads = layout.config.model.num_kv_heads
    if shared == "head" and heads < size:
        each = size // heads
        tensor = range(own // each * each, own // each * each + each)
    return ranks_at(layout.mesh, stages, tuple(tensor))


def use_of(shared: str, stages: Sequence[int], layout: Layout, groups: Groups, rank: int) -> str:
    """The use over whose ranks a gradient of this rank is summed: those that contribute to it."""
    wanted = contributors(shared, stages, layout, rank)
    return next(use for use in REDUCING if use in groups and groups[use].get(rank) == wanted)


def messages(layout: Layout, groups: Groups, rank: int) -> list[tuple[str, int, int]]:
    """All-reduces of a step's gradients on this rank: (use, elements, bytes of an element).

    In buckets, the last of which ends in one element per parameter; or naively one by one, each with a number that says
    whether anybody used it.
    """
    comm, each = layout.config.comm, BYTES[layout.dtype]
    by_use: dict[str, list[int]] = {}
    kind = cache(lambda shared, stages: use_of(shared, stages, layout, groups, rank))  # of a few kinds of parameters
    for weight in reversed(weights(layout, layout.mesh.coords(rank)["pp"])):
        by_use.setdefault(kind(weight.shared, weight.stages), []).append(weight.numel)
    found = []
    for use, sizes in by_use.items():
        if comm.gradients == "naive":
            found += [(use, numel, each) for numel in sizes] + [(use, 1, BYTES["float32"])] * len(sizes)
            continue
        filled = buckets(sizes, int(comm.bucket_mib * MIB) // each, FIRST_BYTES // each)
        filled[-1] += len(sizes)
        found += [(use, elements, each) for elements in filled]
    return found


def buckets(sizes: Sequence[int], limit: int, first: int | None = None) -> list[int]:
    """How full buckets are when each takes the next as long as it fits: the rule of `parallel.buckets.assign`."""
    filled: list[int] = []
    for size in sizes:
        room = limit if len(filled) > 1 or first is None else min(first, limit)
        if filled and filled[-1] + size <= room:
            filled[-1] += size
        else:
            filled.append(size)
    return filled


def group_of(mesh: Mesh, partition: Iterable[Sequence[int]]) -> dict[int, Sequence[int]]:
    """The group of every rank that is in one."""
    return {rank: group for group in partition for rank in group}
