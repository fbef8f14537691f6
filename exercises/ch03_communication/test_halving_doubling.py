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
        result = answer.halving_doubling_all_reduce(tensor, network.group, op)
    expect("the result of halving_doubling_all_reduce, which changes the tensor in place", result, None)
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
    """halve_and_double reduces over the given ranks only, in any order: ranks 0 and 3, and meanwhile ranks 2 and 1."""
    for division in ([[0, 3], [2, 1]], [[2, 0, 3, 1]], [[0, 3, 2, 1]], [[3], [0], [1], [2]]):
        [ranks] = [each for each in division if world.rank in each]
        for op, reduction in REDUCTIONS.items():
            for n in (5, 1, 0):
                flat, given = value(world.rank, n), list(ranks)
                with TransferRecorder(network) as recorder:
                    result = answer.halve_and_double(flat, given, network.group, op)
                expected = reduction(torch.stack([value(rank, n) for rank in ranks]), 0)
                expect(f"the tensor of {n} elements, reduced by {op!r} over ranks {ranks}", flat, expected)
                expect("the result of halve_and_double, which changes the tensor in place", result, None)
                expect("ranks sent to that are not in the list", sorted({*recorder.peers("send")} - {*ranks}), [])


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


@test(points=3, ranks=(4, 5, 7))
def number_of_messages_is_logarithmic(answer, world, network):
    """A rank sends 2 log2(p) messages, p the largest power of two, and at most one more to a surplus rank."""
    tensor, every, recorder = run(answer, world, network, 8)
    expect("the sum of 8 elements", tensor, every.sum(0))
    active, levels = most_active(world.size)
    most = 2 * levels + (active < world.size)
    if len(recorder.peers("send")) > most:
        raise Wrong("wrong", "messages that this rank sends", f"at most {most}", str(len(recorder.peers("send"))))


@test(points=3, ranks=(4, 5, 7))
def number_of_bytes_is_minimal(answer, world, network):
    """All ranks together send 2 (ranks - 1) times the tensor: each equally much, and full tensors for the surplus."""
    n = 12
    _, _, recorder = run(answer, world, network, n)
    active, _ = most_active(world.size)
    sent = sum(all_gather_object(recorder.elements_sent(), network.group))
    expect(f"elements sent by all ranks for {n} elements", sent, 2 * n * (world.size - 1))
    most = 2 * n * (active - 1) // active
    if active == world.size:
        expect("elements that this rank sends", recorder.elements_sent(), most)
    elif recorder.elements_sent() > most + n:
        raise Wrong("wrong", "elements that this rank sends", f"at most {most + n}", str(recorder.elements_sent()))


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
