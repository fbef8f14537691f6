"""Tests of ring_reduce_scatter: whole numbers, so that sums are exact in any order."""

import torch

from exercises.testing import expect, test
from exercises.traffic import Wire


def value(rank, n):
    """The row of a rank: whole numbers, different on every rank."""
    return ((torch.arange(n) * (rank + 3)) % 11 + rank).double()


def run(answer, world, network, lengths, op="sum"):
    """Reduce and scatter parts of these lengths; (parts of this rank, the reduction of all rows in parts, wire).

    The parts are read from the row: what is put into the list in the place of a view of it does not get there.
    """
    rows = [value(rank, sum(lengths)) for rank in range(world.size)]
    mine = rows[world.rank].clone()
    with Wire(network) as wire:
        answer.ring_reduce(list(mine.split(lengths)), network.group, op)
    every = torch.stack(rows)
    whole = {"sum": every.sum(0), "max": every.amax(0), "product": every.prod(0)}[op]
    return mine.split(lengths), whole.split(lengths), wire


@test(points=4, ranks=(1, 2, 3, 4))
def own_part_is_complete(answer, world, network):
    """`parts[rank]`, a view of the row, ends as the sum over all ranks, here with parts of equal length."""
    for length in (1, 3):
        parts, whole, _ = run(answer, world, network, [length] * world.size)
        expect(f"parts[{world.rank}]", parts[world.rank], whole[world.rank])


@test(points=3, ranks=(2, 3, 4))
def parts_need_not_be_equal(answer, world, network):
    """Parts have the lengths they have, nothing at all included."""
    for lengths in ([4, 1, 2, 3], [1, 0, 0, 0], [0, 5, 0, 2]):
        parts, whole, _ = run(answer, world, network, lengths[: world.size])
        case = f"parts of {lengths[: world.size]} elements"
        expect(f"parts[{world.rank}]", parts[world.rank], whole[world.rank], case=case)


@test(points=2, ranks=(3,))
def reduced_as_asked(answer, world, network):
    """`op` says how to reduce: the sum, the maximum, the product."""
    for op in ("max", "product"):
        parts, whole, _ = run(answer, world, network, [2, 2, 2], op)
        expect(f"parts[{world.rank}] reduced by {op!r}", parts[world.rank], whole[world.rank])


@test(points=3, ranks=(4,))
def only_to_the_neighbour(answer, world, network):
    """A rank sends to one neighbour and receives from the other, in size - 1 rounds; none waits its turn."""
    _, _, wire = run(answer, world, network, [2] * world.size)
    wire.expect_a_ring(world)


@test(points=2, ranks=(3, 4))
def nothing_is_sent_twice(answer, world, network):
    """A rank sends every part but the one that it completes, each once."""
    lengths = [4, 1, 2, 3][: world.size]
    _, _, wire = run(answer, world, network, lengths)
    expect("elements sent", wire.sent(), sum(lengths) - lengths[world.rank], case=f"parts of {lengths} elements")
