"""Tests of recursive_doubling: integers, so that sums are exact in any order."""

import torch

from exercises.testing import expect, test
from exercises.traffic import TransferRecorder
from minidist.comm.power_of_two import PowerOfTwoRanks


def value(rank, n):
    """Return a rank's tensor: integers, different on every rank."""
    return ((torch.arange(n) * (rank + 3)) % 11 + rank).double()


def run(answer, world, network, n, op="sum"):
    """All-reduce; return this rank's result, the inputs of all ranks, and the transfers."""
    every = torch.stack([value(rank, n) for rank in range(world.size)])
    tensor = every[world.rank].clone()
    with TransferRecorder(network) as recorder:
        answer.doubling_all_reduce(tensor, network.group, op)
    return tensor, every, recorder


@test(points=4, ranks=(2, 4))
def powers_of_two(answer, world, network):
    """Every rank ends with the sum, on 2 and 4 ranks."""
    for n in (1, 5, 0):
        tensor, every, _ = run(answer, world, network, n)
        expect(f"the sum of {n} elements", tensor, every.sum(0))


@test(points=4, ranks=(3, 5))
def any_number_of_ranks(answer, world, network):
    """Every rank ends with the sum on 3 and 5 ranks: some ranks are folded, and some indices differ from the rank."""
    for n in (1, 5):
        tensor, every, _ = run(answer, world, network, n)
        expect(f"the sum of {n} elements", tensor, every.sum(0))


@test(points=2, ranks=(4,))
def reduces_with_op(answer, world, network):
    """The tensors are reduced by `op`; the mean is the sum divided once by the number of ranks."""
    tensor, every, _ = run(answer, world, network, 6, "max")
    expect("the maximum", tensor, every.amax(0))
    tensor, every, _ = run(answer, world, network, 6, "mean")
    expect("the mean", tensor, every.mean(0), tolerance=1e-12)


@test(points=4, ranks=(4, 5))
def number_of_messages_is_logarithmic(answer, world, network):
    """An active rank exchanges its full tensor once with each active rank at distance 1, 2, 4, ..."""
    _, _, recorder = run(answer, world, network, 6)
    active = PowerOfTwoRanks(world.size)
    if active.is_folded(world.rank) or active.folded_partner(world.rank) is not None:
        return
    index = active.index(world.rank)
    partners = sorted(active.rank(index ^ 1 << k) for k in range(active.count.bit_length() - 1))
    expect("ranks sent to", sorted(recorder.peers("send")), partners)
    expect("ranks received from", sorted(recorder.peers("recv")), partners)
    expect("elements sent", recorder.elements_sent(), 6 * len(partners))
