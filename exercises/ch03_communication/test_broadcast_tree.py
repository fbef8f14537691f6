"""Tests of broadcast_tree: any number of ranks, any root, and as few rounds as there can be."""

import torch

from exercises.testing import expect, test
from exercises.traffic import Wire

SHAPES = [(5,), (2, 3), (1,), (0,)]


def value(rank, shape):
    """What a rank has before: different on every rank."""
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 100 * (rank + 1)


def run(answer, world, network, shape, src):
    """Broadcast from `src`; (tensor of this rank, what it sent)."""
    tensor = value(world.rank, shape)
    with Wire(network) as wire:
        answer.tree_broadcast(tensor, src, network.group)
    return tensor, wire


@test(points=4, ranks=(1, 2, 3, 4))
def everybody_has_it(answer, world, network):
    """Every rank ends with the tensor of rank 0, whatever the number of ranks."""
    for shape in SHAPES:
        tensor, _ = run(answer, world, network, shape, 0)
        expect("the tensor after the broadcast from rank 0", tensor, value(0, shape))


@test(points=3, ranks=(2, 3))
def from_any_root(answer, world, network):
    """Every rank ends with the tensor of the root, whichever that is."""
    for src in range(world.size):
        tensor, _ = run(answer, world, network, (4,), src)
        expect(f"the tensor after the broadcast from rank {src}", tensor, value(src, (4,)))


@test(points=2, ranks=(3, 4))
def each_rank_receives_it_once(answer, world, network):
    """Each rank but the root receives the tensor once, and the root never."""
    _, wire = run(answer, world, network, (6,), 1)
    received = sum(elements for kind, _, elements in wire.transfers if kind == "recv")
    expect("elements received", received, 0 if world.rank == 1 else 6)


@test(points=4, ranks=(4, 7))
def as_few_rounds_as_there_can_be(answer, world, network):
    """Those who have it double in every round: ceil(log2(ranks)) rounds, each rank sending one message in a round."""
    _, wire = run(answer, world, network, (3,), 0)
    every, reached, rounds = wire.of_all_ranks(), {0: 0}, 0
    waiting = [0]
    while waiting:
        rank = waiting.pop()
        for number, peer in enumerate(peer for kind, peer, elements in every[rank] if kind == "send"):
            if peer not in reached:
                reached[peer] = reached[rank] + number + 1
                waiting.append(peer)
        rounds = max(rounds, reached[rank])
    expect("ranks that the messages reach, one after the other", sorted(reached), list(range(world.size)))
    expect("rounds until the last rank has it", rounds, (world.size - 1).bit_length())
