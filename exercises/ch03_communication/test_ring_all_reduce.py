"""Tests of ring_all_reduce: integers, so that sums are exact in any order."""

import torch

from exercises.conditions import check_conditions, declare_all_reduce
from exercises.testing import CONDITION_RANKS, Wrong, expect, test
from exercises.traffic import TransferRecorder, expect_done_or_refused
from minidist.comm import all_gather_object

REDUCTIONS = {"sum": torch.sum, "max": torch.amax, "min": torch.amin, "product": torch.prod}
LENGTHS = ([3, 3, 3, 3], [4, 1, 2, 3], [1, 0, 0, 0], [0, 5, 0, 2])  # of chunks


def value(rank, shape):
    """Return a rank's tensor: integers, different on every rank."""
    numbers = torch.arange(torch.Size(shape).numel())
    return ((numbers * (rank + 3)) % 11 + rank).double().reshape(shape)


def run(answer, world, network, shape, op="sum"):
    """All-reduce; return this rank's result, the inputs of all ranks, and the transfers."""
    every = torch.stack([value(rank, shape) for rank in range(world.size)])
    tensor = every[world.rank].clone()
    with TransferRecorder(network) as recorder:
        result = answer.ring_all_reduce(tensor, network.group, op)
    expect("the result of ring_all_reduce, which changes the tensor in place", result, None)
    return tensor, every, recorder


def run_half(answer, world, network, half, lengths, *op):
    """Run one half on chunks of these lengths; return this rank's chunks, what they must be, and the transfers.

    The chunks are views of the tensor: replacing an entry of the list does not change the tensor. Those that do not
    count before the all-gather are NaN. op: none for the default.
    """
    every = torch.stack([value(rank, (sum(lengths),)) for rank in range(world.size)])
    mine = every[world.rank].clone()
    with TransferRecorder(network) as recorder:
        if half == "reduce-scatter":
            result = answer.ring_reduce_scatter(list(mine.split(lengths)), network.group, *op)
            expected = REDUCTIONS[op[0] if op else "sum"](every, 0)
        else:
            for rank, chunk in enumerate(mine.split(lengths)):
                if rank != world.rank:
                    chunk.fill_(torch.nan)
            result = answer.ring_all_gather(list(mine.split(lengths)), network.group)
            expected = torch.cat([each.split(lengths)[rank] for rank, each in enumerate(every)])
    expect(f"the result of the {half}, which changes the chunks in place", result, None)
    return mine.split(lengths), expected.split(lengths), recorder


@test(points=4, ranks=(1, 2, 3, 4))
def reduce_scatter_completes_the_own_chunk(answer, world, network):
    """After ring_reduce_scatter `chunks[rank]`, a view of the tensor, is the sum over all ranks."""
    for lengths in (each[: world.size] for each in LENGTHS):
        chunks, expected, _ = run_half(answer, world, network, "reduce-scatter", lengths)
        case = f"chunks of {lengths} elements"
        expect(f"chunks[{world.rank}]", chunks[world.rank], expected[world.rank], case=case)


@test(points=2, ranks=(3,))
def reduce_scatter_with_op(answer, world, network):
    """ring_reduce_scatter reduces by `op`: the maximum, the minimum, the product."""
    for op in ("max", "min", "product"):
        chunks, expected, _ = run_half(answer, world, network, "reduce-scatter", [2, 2, 2], op)
        expect(f"chunks[{world.rank}] reduced by {op!r}", chunks[world.rank], expected[world.rank])


@test(points=3, ranks=(1, 2, 3, 4))
def all_gather_completes_all_chunks(answer, world, network):
    """After ring_all_gather all chunks are in the tensor of which they are views."""
    for lengths in (each[: world.size] for each in LENGTHS):
        chunks, expected, _ = run_half(answer, world, network, "all-gather", lengths)
        expect("the chunks", torch.cat(chunks), torch.cat(expected), case=f"chunks of {lengths} elements")


@test(points=3, ranks=(3, 4))
def each_half_is_a_ring(answer, world, network):
    """In both halves ranks send to neighbours only, all at the same time, and each chunk but one once."""
    lengths = [4, 2, 3, 5][: world.size]  # none so short that half of it, in a ring both ways, is empty and not sent
    _, _, recorder = run_half(answer, world, network, "reduce-scatter", lengths)
    sent, case = sum(lengths) - lengths[world.rank], f"chunks of {lengths} elements"
    expect("elements sent in the reduce-scatter", recorder.elements_sent(), sent, case=case)
    recorder.expect_ring(world)
    _, _, recorder = run_half(answer, world, network, "all-gather", [2] * world.size)
    expect("elements sent in the all-gather", recorder.elements_sent(), 2 * (world.size - 1))
    recorder.expect_ring(world)


@test(points=2, ranks=(1, 2, 3, 4))
def all_ranks_get_the_sum(answer, world, network):
    """Every rank ends with the sum, in the tensor that it passed."""
    for shape in ((world.size,), (2, 6), (12,)):
        tensor, every, _ = run(answer, world, network, shape)
        expect(f"the tensor of shape {shape}", tensor, every.sum(0))


@test(points=3, ranks=(2, 3, 4))
def sizes_that_do_not_divide(answer, world, network):
    """The number of elements may be smaller than the number of ranks, not divisible by it, or 0."""
    for n in (world.size + 1, 1, 7, 0):
        tensor, every, _ = run(answer, world, network, (n,))
        expect(f"the sum of {n} elements", tensor, every.sum(0))


@test(points=3, ranks=(3, 4))
def number_of_bytes_is_minimal(answer, world, network):
    """All ranks together send 2 (ranks - 1) times the tensor, each an equal amount, to its neighbours only."""
    size = world.size
    for n in (12, 13, 15):
        _, _, recorder = run(answer, world, network, (n,))
        sent = sum(all_gather_object(recorder.elements_sent(), network.group))
        expect(f"elements sent by all ranks for {n} elements", sent, 2 * n * (world.size - 1))
        # All chunks but one, twice. A ring in both directions has half of the tensor in each, so shorter chunks.
        halves = (n // 2, n - n // 2)
        least = min(2 * (n - -(-n // size)), 2 * sum(half - -(-half // size) for half in halves))
        most = max(2 * (size - 1) * -(-n // size), 2 * sum(half - half // size for half in halves))
        if not least <= recorder.elements_sent() <= most:
            what = f"elements that this rank sends for {n} elements: all ranks must send equally much"
            raise Wrong("wrong", what, f"{least} to {most}", str(recorder.elements_sent()))
        near = {(world.rank + 1) % world.size, (world.rank - 1) % world.size}
        expect("ranks sent to that are not neighbours", sorted(set(recorder.peers("send")) - near), [])


@test(points=1, ranks=(3,))
def all_ranks_get_identical_bits(answer, world, network):
    """All ranks sum in the same order, so their results are identical bit for bit."""
    tensor = torch.linspace(0.1, 1.1, 7) * (world.rank + 1) ** 3
    answer.ring_all_reduce(tensor, network.group)
    every = all_gather_object(tensor.tolist(), network.group)
    expect("the sums of all ranks, which must equal rank 0's", every, [every[0]] * world.size)
    expect("the sum", tensor, torch.linspace(0.1, 1.1, 7) * sum((r + 1) ** 3 for r in range(3)), tolerance=1e-4)


@test(points=1, ranks=(3,))
def never_works_on_a_copy(answer, world, network):
    """A tensor that is not contiguous is reduced, or refused with an exception; it does not stay as it is."""
    every = [value(rank, (2, 3)) for rank in range(world.size)]
    mine = every[world.rank].t().contiguous().t()
    expect_done_or_refused(lambda tensor: answer.ring_all_reduce(tensor, network.group), mine, sum(every))


def all_reduced(answer, group, tensor, op):
    answer.ring_all_reduce(tensor, group, op)
    return tensor


def sent_bytes(ranks):
    """What all ranks together send around a ring: every element twice, but for each rank's own chunk."""
    return 2 * (len(ranks) - 1) * ranks[0]["tensor"].nbytes


DECLARATION, ROUNDED = declare_all_reduce(all_reduced, sent_bytes)


@test(points=2, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """Every dtype, size, layout, reduction and group, also one of only some ranks; all ranks get the same bits."""
    check_conditions(DECLARATION, answer, world, network)
    check_conditions(ROUNDED, answer, world, network)
