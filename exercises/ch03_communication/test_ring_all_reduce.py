"""Tests of ring_all_reduce: whole numbers, so that sums are exact in any order."""

import torch

from exercises.testing import Wrong, expect, test
from exercises.traffic import Wire
from minidist.comm import all_gather_object


def value(rank, shape):
    """The tensor of a rank: whole numbers, different on every rank."""
    numbers = torch.arange(torch.Size(shape).numel())
    return ((numbers * (rank + 3)) % 11 + rank).double().reshape(shape)


def run(answer, world, network, shape, op="sum"):
    """All-reduce; (tensor of this rank, the tensors of all before, wire)."""
    every = torch.stack([value(rank, shape) for rank in range(world.size)])
    tensor = every[world.rank].clone()
    with Wire(network) as wire:
        answer.all_reduce(tensor, network.group, op)
    return tensor, every, wire


@test(points=4, ranks=(1, 2, 3, 4))
def everybody_has_the_sum(answer, world, network):
    """Every rank ends with the sum, in the tensor that it gave."""
    for shape in ((world.size,), (2, 6), (12,)):
        tensor, every, _ = run(answer, world, network, shape)
        expect(f"the tensor of shape {shape}", tensor, every.sum(0))


@test(points=3, ranks=(2, 3, 4))
def sizes_need_not_divide(answer, world, network):
    """Any number of elements: fewer than ranks, one more, none."""
    for n in (world.size + 1, 1, 7, 0):
        tensor, every, _ = run(answer, world, network, (n,))
        expect(f"the sum of {n} elements", tensor, every.sum(0))


@test(points=2, ranks=(3,))
def reduced_as_asked(answer, world, network):
    """`op` says how to reduce; a mean is the sum, divided by the number of ranks once."""
    tensor, every, _ = run(answer, world, network, (6,), "max")
    expect("the maximum", tensor, every.amax(0))
    tensor, every, _ = run(answer, world, network, (6,), "mean")
    expect("the mean", tensor, every.mean(0), tolerance=1e-12)


@test(points=3, ranks=(3, 4))
def as_few_bytes_as_there_can_be(answer, world, network):
    """All ranks together send 2 (ranks - 1) times the tensor: each an equal share of that, to its neighbours only."""
    for n in (12, 13):
        _, _, wire = run(answer, world, network, (n,))
        sent = sum(all_gather_object(wire.sent(), network.group))
        expect(f"elements sent by all ranks for {n} elements", sent, 2 * n * (world.size - 1))
        share = 2 * (world.size - 1) * -(-n // world.size)
        if wire.sent() > share:
            what = f"elements that this rank sends for {n} elements: no rank is to send more than the others"
            raise Wrong("wrong", what, f"at most {share}", str(wire.sent()))
        near = {(world.rank + 1) % world.size, (world.rank - 1) % world.size}
        expect("ranks sent to that are no neighbours", sorted(set(wire.peers("send")) - near), [])


@test(points=2, ranks=(3,))
def all_ranks_have_the_same_bits(answer, world, network):
    """Whatever the order of addition, it is one order: replicas must not drift apart."""
    tensor = torch.linspace(0.1, 1.1, 7) * (world.rank + 1) ** 3
    answer.all_reduce(tensor, network.group)
    every = all_gather_object(tensor.tolist(), network.group)
    expect("the sums that ranks have, each as rank 0 has it", every, [every[0]] * world.size)
    expect("the sum", tensor, torch.linspace(0.1, 1.1, 7) * sum((r + 1) ** 3 for r in range(3)), tolerance=1e-4)
