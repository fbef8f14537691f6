"""Tests of ring_all_gather: every rank begins with its own part, and with nonsense in the places of the others."""

import torch

from exercises.testing import expect, test
from exercises.traffic import Wire


def part_of(rank, length):
    """The part that a rank brings: different on every rank."""
    return torch.arange(float(length)) + 100 * (rank + 1)


def run(answer, world, network, lengths):
    """Gather parts of these lengths; (parts of this rank, wire).

    The parts are read from the row: what is put into the list in the place of a view of it does not get there.
    """
    parts = torch.full((sum(lengths),), -1.0 - world.rank).split(lengths)
    parts[world.rank].copy_(part_of(world.rank, lengths[world.rank]))
    with Wire(network) as wire:
        answer.ring_gather(list(parts), network.group)
    return parts, wire


def are_complete(parts, lengths):
    case = f"parts of {lengths} elements"
    for rank, length in enumerate(lengths):
        expect(f"parts[{rank}]", parts[rank], part_of(rank, length), case=case)


@test(points=4, ranks=(1, 2, 3, 4))
def everybody_has_every_part(answer, world, network):
    """Every rank ends with the parts of all in its own row, of which they are views; here of equal length."""
    if world.size == 1:
        parts, _ = run(answer, world, network, [3])
        are_complete(parts, [3])
    for length in (1, 3):
        parts, _ = run(answer, world, network, [length] * world.size)
        are_complete(parts, [length] * world.size)


@test(points=3, ranks=(2, 3, 4))
def parts_need_not_be_equal(answer, world, network):
    """Parts have the lengths they have, nothing at all included."""
    for lengths in ([4, 1, 2, 3], [1, 0, 0, 0], [0, 5, 0, 2]):
        parts, _ = run(answer, world, network, lengths[: world.size])
        are_complete(parts, lengths[: world.size])


@test(points=3, ranks=(4,))
def only_to_the_neighbour(answer, world, network):
    """A rank sends to one neighbour and receives from the other, in size - 1 rounds; none waits its turn."""
    _, wire = run(answer, world, network, [2] * world.size)
    wire.expect_a_ring(world)


@test(points=2, ranks=(3, 4))
def nothing_is_sent_twice(answer, world, network):
    """A rank sends every part but the one that its neighbour brings itself, each once."""
    lengths = [4, 1, 2, 3][: world.size]
    _, wire = run(answer, world, network, lengths)
    expect("ranks sent to", len(set(wire.peers("send"))), 1)
    neighbour = wire.peers("send")[0]
    expect("elements sent", wire.sent(), sum(lengths) - lengths[neighbour], case=f"parts of {lengths} elements")
