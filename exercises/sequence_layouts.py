"""Which tokens of a sequence each rank has: written by hand, for the tests of context parallelism.

Each function takes the numbers of ranks and of tokens per rank, and returns (ranks, tokens) positions, a row per rank.
"""

import torch
from torch import Tensor


def contiguous(ranks: int, each: int) -> Tensor:
    """Rank r has the positions r each, ..., (r + 1) each - 1."""
    return torch.arange(ranks * each).view(ranks, each)


def zigzag(ranks: int, each: int) -> Tensor:
    """Rank r has the chunks r and 2 ranks - 1 - r of 2 ranks."""
    chunks = torch.arange(ranks * each).view(2 * ranks, -1)
    return torch.cat((chunks[:ranks], chunks[ranks:].flip(0)), 1)


def in_turn(ranks: int, each: int) -> Tensor:
    """Rank r has the positions r, r + ranks, r + 2 ranks, ..."""
    return torch.arange(ranks * each).view(each, ranks).T.contiguous()


LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag, "in turn": in_turn}
