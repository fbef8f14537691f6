"""Tests of broadcast_tree: any number of ranks, any root, and the minimal number of rounds."""

import torch

from exercises.testing import expect, test
from exercises.traffic import TransferRecorder

SHAPES = [(5,), (2, 3), (1,), (0,)]


def value(rank, shape):
    """Return a rank's tensor before the broadcast: different on every rank."""
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 100 * (rank + 1)


def run(answer, world, network, shape, src):
    """Broadcast from `src`; return this rank's tensor and its transfers."""
    tensor = value(world.rank, shape)
    with TransferRecorder(network) as recorder:
        answer.tree_broadcast(tensor, src, network.group)
    return tensor, recorder


@test(points=4, ranks=(1, 2, 3, 4))
def all_ranks_get_the_tensor(answer, world, network):
    """Every rank ends with the tensor of rank 0, whatever the number of ranks."""
    for shape in SHAPES:
        tensor, _ = run(answer, world, network, shape, 0)
        expect("the tensor after the broadcast from rank 0", tensor, value(0, shape))


@test(points=3, ranks=(2, 3))
def from_any_root(answer, world, network):
    """Every rank ends with the root's tensor, for every choice of root."""
    for src in range(world.size):
        tensor, _ = run(answer, world, network, (4,), src)
        expect(f"the tensor after the broadcast from rank {src}", tensor, value(src, (4,)))


@test(points=2, ranks=(3, 4))
def each_rank_receives_once(answer, world, network):
    """Each rank but the root receives the tensor once, and the root never."""
    _, recorder = run(answer, world, network, (6,), 1)
    received = sum(elements for kind, _, elements in recorder.transfers if kind == "recv")
    expect("elements received", received, 0 if world.rank == 1 else 6)


@test(points=4, ranks=(4, 7))
def number_of_rounds_is_minimal(answer, world, network):
    """The number of ranks with the tensor doubles in each round: ceil(log2(ranks)) rounds, one send per rank each."""
    _, recorder = run(answer, world, network, (3,), 0)
    transfers_by_rank, reached, rounds = recorder.gather_transfers(), {0: 0}, 0
    waiting = [0]
    while waiting:
        rank = waiting.pop()
        for number, peer in enumerate(peer for kind, peer, elements in transfers_by_rank[rank] if kind == "send"):
            if peer not in reached:
                reached[peer] = reached[rank] + number + 1
                waiting.append(peer)
        rounds = max(rounds, reached[rank])
    expect("ranks that the messages reach from the root", sorted(reached), list(range(world.size)))
    expect("rounds until the last rank has the tensor", rounds, (world.size - 1).bit_length())
