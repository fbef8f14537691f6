"""Tests of ring_all_gather: every rank starts with its own chunk, and with wrong values in the others."""

import torch

from exercises.conditions import Declaration, Tensors, check_conditions
from exercises.testing import CONDITION_RANKS, expect, test
from exercises.traffic import TransferRecorder


def chunk_of(rank, length):
    """Return a rank's chunk: different on every rank."""
    return torch.arange(float(length)) + 100 * (rank + 1)


def run(answer, world, network, lengths):
    """All-gather chunks of these lengths; return this rank's chunks and the transfers.

    The chunks are views of one tensor: replacing an entry of the list does not change the tensor.
    """
    chunks = torch.full((sum(lengths),), -1.0 - world.rank).split(lengths)
    chunks[world.rank].copy_(chunk_of(world.rank, lengths[world.rank]))
    with TransferRecorder(network) as recorder:
        answer.ring_gather(list(chunks), network.group)
    return chunks, recorder


def expect_complete(chunks, lengths):
    case = f"chunks of {lengths} elements"
    for rank, length in enumerate(lengths):
        expect(f"chunks[{rank}]", chunks[rank], chunk_of(rank, length), case=case)


@test(points=4, ranks=(1, 2, 3, 4))
def all_ranks_get_all_chunks(answer, world, network):
    """Every rank ends with all chunks, in the tensor of which they are views; here they have equal length."""
    if world.size == 1:
        chunks, _ = run(answer, world, network, [3])
        expect_complete(chunks, [3])
    for length in (1, 3):
        chunks, _ = run(answer, world, network, [length] * world.size)
        expect_complete(chunks, [length] * world.size)


@test(points=3, ranks=(2, 3, 4))
def chunks_may_be_unequal(answer, world, network):
    """Chunks may have unequal lengths, and length 0."""
    for lengths in ([4, 1, 2, 3], [1, 0, 0, 0], [0, 5, 0, 2]):
        chunks, _ = run(answer, world, network, lengths[: world.size])
        expect_complete(chunks, lengths[: world.size])


@test(points=3, ranks=(4,))
def sends_to_one_neighbour(answer, world, network):
    """Ranks send to neighbours only, in one direction or half in each, all ranks at the same time."""
    _, recorder = run(answer, world, network, [2] * world.size)
    recorder.expect_ring(world)


@test(points=2, ranks=(3, 4))
def sends_each_chunk_once(answer, world, network):
    """Each rank receives every chunk but its own once, and nothing else."""
    lengths = [4, 1, 2, 3][: world.size]
    _, recorder = run(answer, world, network, lengths)
    case = f"chunks of {lengths} elements"
    expect("elements received", recorder.elements_received(), sum(lengths) - lengths[world.rank], case=case)


def gathered(answer, group, input):
    output = torch.full((group.size * input.numel(),), 7, dtype=input.dtype)
    answer.all_gather(output, input, group)
    return output


DECLARATION = Declaration(
    inputs={"input": Tensors(layouts=("slice", "scalar"))},
    call=gathered,
    reference=lambda ranks, rank: torch.cat([each["input"].reshape(-1) for each in ranks]),
    replicas=True,
    max_bytes=lambda ranks: len(ranks) * (len(ranks) - 1) * ranks[0]["input"].nbytes,
)


@test(points=3, ranks=CONDITION_RANKS)
def holds_under_every_condition(answer, world, network):
    """all_gather, with every dtype, size and group, also one of only some ranks; `input` does not change."""
    check_conditions(DECLARATION, answer, world, network)
