"""Tests of halving_doubling: integers, so that sums are exact in any order."""

import torch

from exercises.conditions import check_conditions, declare_all_reduce
from exercises.testing import CONDITION_RANKS, Wrong, expect, test
from exercises.traffic import TransferRecorder, expect_done_or_refused
from minidist.comm import all_gather_object

REDUCTIONS = {"sum": torch.sum, "max": torch.amax, "min": torch.amin, "product": torch.prod}


def value(rank, n):
    """Return a rank's tensor: integers, different on every rank."""
    return ((torch.arange(n) * (rank + 3)) % 11 + rank).double()


def run(answer, world, network, n, op="sum"):
    """All-reduce; return this rank's result, the inputs of all ranks, and the transfers."""
    every = torch.stack([value(rank, n) for rank in range(world.size)])
    tensor = every[world.rank].clone()
    with TransferRecorder(network) as recorder:
        answer.halving_doubling_all_reduce(tensor, network.group, op)
    return tensor, every, recorder


def most_active(size):
    """Return the largest power of two that is not above `size`, and its logarithm."""
    levels = size.bit_length() - 1
    return 1 << levels, levels


@test(points=4, ranks=(1, 2, 4))
def powers_of_two(answer, world, network):
    """Every rank ends with the sum, on 1, 2 and 4 ranks, also for sizes that do not divide."""
    for n in (8, 1, 5, 7, 0):
        tensor, every, _ = run(answer, world, network, n)
        expect(f"the sum of {n} elements", tensor, every.sum(0))


@test(points=2, ranks=(4,))
def two_of_four_ranks(answer, world, network):
    """halve_and_double reduces over the given ranks only: here ranks 0 and 3, and at the same time ranks 2 and 1."""
    ranks = [0, 3] if world.rank in (0, 3) else [2, 1]
    flat = value(world.rank, 5)
    with TransferRecorder(network):
        answer.halve_and_double(flat, ranks, network.group, "sum")
    expect(f"the sum over ranks {ranks}", flat, sum(value(rank, 5) for rank in ranks))


@test(points=4, ranks=(3, 5, 7))
def any_number_of_ranks(answer, world, network):
    """Every rank ends with the sum on 3, 5 and 7 ranks, of which some are surplus."""
    for n in (1, 5, 8):
        tensor, every, _ = run(answer, world, network, n)
        expect(f"the sum of {n} elements", tensor, every.sum(0))


@test(points=2, ranks=(3, 4))
def reduces_with_op(answer, world, network):
    """The tensors are reduced by `op`."""
    for op in ("max", "min", "product"):
        tensor, every, _ = run(answer, world, network, 6, op)
        expect(f"the tensor reduced by {op!r}", tensor, REDUCTIONS[op](every, 0))


@test(points=3, ranks=(4, 5))
def number_of_messages_is_logarithmic(answer, world, network):
    """A rank sends 2 log2(p) messages, p the largest power of two, and at most one more to a surplus rank."""
    tensor, every, recorder = run(answer, world, network, 8)
    expect("the sum of 8 elements", tensor, every.sum(0))
    active, levels = most_active(world.size)
    most = 2 * levels + (active < world.size)
    if len(recorder.peers("send")) > most:
        raise Wrong("wrong", "messages that this rank sends", f"at most {most}", str(len(recorder.peers("send"))))


@test(points=3, ranks=(4, 5))
def number_of_bytes_is_minimal(answer, world, network):
    """All ranks together send 2 (ranks - 1) times the tensor; on a power of two of ranks each equally much."""
    n = 12
    _, _, recorder = run(answer, world, network, n)
    active, _ = most_active(world.size)
    sent = sum(all_gather_object(recorder.elements_sent(), network.group))
    expect(f"elements sent by all ranks for {n} elements", sent, 2 * n * (world.size - 1))
    if active == world.size:
        expect("elements that this rank sends", recorder.elements_sent(), 2 * n * (active - 1) // active)


@test(points=1, ranks=(3,))
def never_works_on_a_copy(answer, world, network):
    """A tensor that is not contiguous is reduced, or refused with an exception; it does not stay as it is."""
    every = [value(rank, 6).reshape(2, 3) for rank in range(world.size)]
    mine = every[world.rank].t().contiguous().t()
    expect_done_or_refused(lambda tensor: answer.halving_doubling_all_reduce(tensor, network.group), mine, sum(every))


def all_reduced(answer, group, tensor, op):
    answer.halving_doubling_all_reduce(tensor, group, op)
    return tensor


def sent_bytes(ranks):
    """What all ranks together send: every element twice for each rank but one, whether it is surplus or not."""
    return 2 * (len(ranks) - 1) * ranks[0]["tensor"].nbytes


DECLARATION, ROUNDED = declare_all_reduce(all_reduced, sent_bytes)


@test(points=3, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Every dtype, size, layout, reduction and group, also one of only some ranks; all ranks get the same bits."""
    check_conditions(DECLARATION, answer, world, network)
    check_conditions(ROUNDED, answer, world, network)
