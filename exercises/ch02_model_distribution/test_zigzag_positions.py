"""Tests of zigzag_positions: layouts written by hand, and the scores of a causal mask counted."""

import itertools

import torch

from exercises.sequence_layouts import contiguous, zigzag
from exercises.testing import Wrong, expect, expect_raises, test

RANKS = (1, 2, 3, 4, 7)


def cases():
    """Yield (number of ranks, tokens per rank), from small to large."""
    for ranks in RANKS:
        for each in (2, 4, 6):
            yield ranks, each


@test(points=4)
def positions_of_all_ranks(answer):
    """Row r of the result has the positions of rank r, ascending, in both layouts."""
    odd = [(ranks, each) for ranks in RANKS for each in (1, 5)]
    for is_zigzag, layout, sizes in (
        (False, contiguous, [*cases(), *odd]),
        (True, zigzag, cases()),
        (True, contiguous, [(1, 1), (1, 2), (1, 5)]),  # one rank: not cut
    ):
        for ranks, each in sizes:
            got, wanted = answer.positions_by_rank(ranks * each, ranks, is_zigzag), layout(ranks, each)
            case = f"{ranks * each} tokens on {ranks} ranks, zigzag={is_zigzag}"
            if not isinstance(got, torch.Tensor):
                raise Wrong("type", "positions_by_rank returns a tensor", "a tensor", type(got).__name__, case)
            expect("the positions", got, wanted, case=case)
            expect("dtype", str(got.dtype), "torch.int64", case=case)


@test(points=2)
def positions_of_one_rank(answer):
    """`rank_positions` returns the row of a rank."""
    for ranks, each in [*cases(), (1, 5), (3, 5)]:
        for is_zigzag, layout in ((False, contiguous), (True, contiguous if ranks == 1 else zigzag)):
            if layout is zigzag and each % 2:
                continue
            for rank in range(ranks):
                got = answer.rank_positions(ranks * each, ranks, rank, is_zigzag)
                case = f"rank {rank}, {ranks * each} tokens on {ranks} ranks, zigzag={is_zigzag}"
                if not isinstance(got, torch.Tensor):
                    raise Wrong("type", "rank_positions returns a tensor", "a tensor", type(got).__name__, case)
                expect("the positions", got, layout(ranks, each)[rank], case=case)
                expect("dtype", str(got.dtype), "torch.int64", case=case)


@test(points=3)
def equal_work(answer):
    """In zig-zag every rank has equally many scores, also with the keys of each other rank alone."""
    for ranks, each in cases():
        positions = answer.positions_by_rank(ranks * each, ranks, True)
        counts = [[int((own[:, None] >= other).sum()) for other in positions] for own in positions]
        case = f"{ranks * each} tokens on {ranks} ranks"
        total = ranks * each * (ranks * each + 1) // 2
        expect("scores by rank", [sum(row) for row in counts], [total // ranks] * ranks, case=case)
        others = sorted({count for i, row in enumerate(counts) for j, count in enumerate(row) if i != j})
        expect("scores with the keys of another rank", others, [each**2 // 2] * (ranks > 1), case=case)


@test(points=3)
def lengths_that_cannot_be_cut(answer):
    """A ValueError that names the length, if the parts or chunks cannot be equally long."""
    for seq_len, ranks, is_zigzag in itertools.product(range(1, 31), RANKS, (False, True)):
        if seq_len % (2 * ranks if is_zigzag and ranks > 1 else ranks) == 0:
            continue
        expect_raises(ValueError, answer.positions_by_rank, seq_len, ranks, is_zigzag)
        try:
            answer.positions_by_rank(seq_len, ranks, is_zigzag)
        except ValueError as error:
            case = f"{seq_len} tokens on {ranks} ranks, zigzag={is_zigzag}"
            expect("whether the message has the length", str(seq_len) in str(error), True, case=case)
        expect_raises(ValueError, answer.rank_positions, seq_len, ranks, 0, is_zigzag)
