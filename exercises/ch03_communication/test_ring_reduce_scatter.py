"""Tests of ring_reduce_scatter: integers, so that sums are exact in any order."""

from dataclasses import replace

import torch

from exercises.conditions import FLOATS, Choices, Declaration, Tensors, check_conditions, reduced
from exercises.testing import CONDITION_RANKS, expect, test
from exercises.traffic import TransferRecorder


def value(rank, n):
    """Return a rank's tensor: integers, different on every rank."""
    return ((torch.arange(n) * (rank + 3)) % 11 + rank).double()


def run(answer, world, network, lengths, op="sum"):
    """Reduce-scatter chunks of these lengths; return this rank's chunks, the full reduction's, and the transfers.

    The chunks are views of the tensor: replacing an entry of the list does not change the tensor.
    """
    tensors = [value(rank, sum(lengths)) for rank in range(world.size)]
    mine = tensors[world.rank].clone()
    with TransferRecorder(network) as recorder:
        answer.ring_reduce(list(mine.split(lengths)), network.group, op)
    stacked = torch.stack(tensors)
    reduced = {"sum": stacked.sum(0), "max": stacked.amax(0), "product": stacked.prod(0), "mean": stacked.sum(0)}[op]
    return mine.split(lengths), reduced.split(lengths), recorder


@test(points=4, ranks=(1, 2, 3, 4))
def own_chunk_is_complete(answer, world, network):
    """`chunks[rank]`, a view of the tensor, ends as the sum over all ranks; here the chunks have equal length."""
    for length in (1, 3):
        chunks, reduced, _ = run(answer, world, network, [length] * world.size)
        expect(f"chunks[{world.rank}]", chunks[world.rank], reduced[world.rank])


@test(points=3, ranks=(2, 3, 4))
def chunks_may_be_unequal(answer, world, network):
    """Chunks may have unequal lengths, and length 0."""
    for lengths in ([4, 1, 2, 3], [1, 0, 0, 0], [0, 5, 0, 2]):
        chunks, reduced, _ = run(answer, world, network, lengths[: world.size])
        case = f"chunks of {lengths[: world.size]} elements"
        expect(f"chunks[{world.rank}]", chunks[world.rank], reduced[world.rank], case=case)


@test(points=2, ranks=(3,))
def reduces_with_op(answer, world, network):
    """Chunks are reduced by `op`: the maximum, the product; for a mean ring_reduce only adds."""
    for op in ("max", "product", "mean"):
        chunks, reduced, _ = run(answer, world, network, [2, 2, 2], op)
        expect(f"chunks[{world.rank}] reduced by {op!r}", chunks[world.rank], reduced[world.rank])


@test(points=3, ranks=(4,))
def sends_to_one_neighbour(answer, world, network):
    """Ranks send to neighbours only, in one direction or half in each, all ranks at the same time."""
    _, _, recorder = run(answer, world, network, [2] * world.size)
    recorder.expect_ring(world)


@test(points=2, ranks=(3, 4))
def sends_each_chunk_once(answer, world, network):
    """Each rank sends every chunk once, except the one that it completes."""
    lengths = [4, 1, 2, 3][: world.size]
    _, _, recorder = run(answer, world, network, lengths)
    expect(
        "elements sent",
        recorder.elements_sent(),
        sum(lengths) - lengths[world.rank],
        case=f"chunks of {lengths} elements",
    )


def scattered(answer, group, input, op):
    numel = input.numel() // group.size
    shape = (numel // 3, 3) if numel % 3 == 0 else (numel,)
    output = torch.full(shape, 7, dtype=input.dtype)
    answer.reduce_scatter(output, input, group, op)
    return output.view(-1)


def shard(ranks, rank):
    """The part of the full reduction that belongs to this rank."""
    return reduced([each["input"] for each in ranks], ranks[0]["op"]).tensor_split(len(ranks))[rank]


DECLARATION = Declaration(
    inputs={
        "input": Tensors(lambda ranks: 3 * ranks, layouts=("slice",), sizes=False),
        "op": Choices(("sum", "max", "min")),
    },
    call=scattered,
    reference=shard,
    max_bytes=lambda ranks: (len(ranks) - 1) * ranks[0]["input"].nbytes,
)
EMPTY = replace(
    DECLARATION, inputs=DECLARATION.inputs | {"input": Tensors(lambda ranks: 0, (torch.float32,), (), False)}
)
ROUNDED = replace(
    DECLARATION,
    inputs={
        "input": Tensors(lambda ranks: 2 * ranks, FLOATS, (), sizes=False, non_finite=False),
        "op": Choices(("mean", "product")),
    },
    roundings=8,  # a product of at most seven numbers, or a quotient
)


@test(points=3, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """reduce_scatter, with every dtype, reduction and group, also one of only some ranks; `input` does not change."""
    for declaration in (DECLARATION, EMPTY, ROUNDED):
        check_conditions(declaration, answer, world, network)
