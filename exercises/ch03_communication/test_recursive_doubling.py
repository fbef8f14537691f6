"""Tests of recursive_doubling: integers, so that sums are exact in any order."""

import torch

from exercises.conditions import check_conditions, declare_all_reduce
from exercises.testing import CONDITION_RANKS, expect, test
from exercises.traffic import TransferRecorder, expect_done_or_refused
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
    tiny = torch.full((4,), 2.0**-149)  # of float32; a quarter of it would be rounded to 0
    answer.doubling_all_reduce(tiny, network.group, "mean")
    expect("the mean of the smallest number", tiny.tolist(), [2.0**-149] * 4)


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


@test(points=1, ranks=(3,))
def never_works_on_a_copy(answer, world, network):
    """A tensor that is not contiguous is reduced, or refused with an exception; it does not stay as it is."""
    every = [value(rank, 6).reshape(2, 3) for rank in range(world.size)]
    mine = every[world.rank].t().contiguous().t()
    expect_done_or_refused(lambda tensor: answer.doubling_all_reduce(tensor, network.group), mine, sum(every))


def all_reduced(answer, group, tensor, op):
    answer.doubling_all_reduce(tensor, group, op)
    return tensor


def sent_bytes(ranks):
    """What all ranks together send: each active rank once per round, and each folded rank's tensor in and out."""
    active = 1 << (len(ranks).bit_length() - 1)
    return (active * (active.bit_length() - 1) + 2 * (len(ranks) - active)) * ranks[0]["tensor"].nbytes


DECLARATION, ROUNDED = declare_all_reduce(all_reduced, sent_bytes)


@test(points=3, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Every dtype, size, layout, reduction and group, also one of only some ranks; all ranks get the same bits."""
    check_conditions(DECLARATION, answer, world, network)
    check_conditions(ROUNDED, answer, world, network)
