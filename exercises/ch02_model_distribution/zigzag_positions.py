"""Zig-zag: equal work for all ranks.

Decide which tokens of a sequence each of n ranks gets. A late query attends to more keys than an early one, so with
contiguous parts the last rank has the most to compute, and all others wait for it. In zig-zag every rank gets a part
from the front and one from the back.

seq_len: s tokens. num_ranks: n. Returns the positions of all ranks' tokens, (n, s / n) int64: row r is rank r's, in
ascending order. zigzag False: row r is the r-th of n equal parts. True: the sequence is cut into 2n equal chunks, and
row r has chunk r from the front followed by chunk r from the back, both counted from 0. On one rank it is not cut at
all. Raises ValueError, with seq_len in its message, if the parts or chunks cannot be equally long. rank_positions:
(s / n,), the row of one rank.
Example: seq_len = 8, num_ranks = 2. Contiguous: [[0, 1, 2, 3], [4, 5, 6, 7]]. Zig-zag: [[0, 1, 6, 7], [2, 3, 4, 5]].
    Query 5 attends to 6 keys. Contiguous: 1 + 2 + 3 + 4 = 10 scores on rank 0, 26 on rank 1. Zig-zag: 18 on both.

Checked: all positions of both layouts for 1 to 7 ranks, shape and dtype; that in zig-zag every rank has equally many
scores, in all and with the keys of each other rank; and the ValueError.

You may call:
    torch.arange(number)   0, 1, ..., number - 1, int64; Tensor.view(rows, -1)
    Tensor.flip(0)   the rows in the opposite order; torch.cat((a, b), dim)

Check it with: python -m exercises check zigzag_positions

Stub 2536776c.
"""

import torch
from torch import Tensor


def rank_positions(seq_len: int, num_ranks: int, rank: int, zigzag: bool) -> Tensor:
    """Return the positions of one rank's tokens, (s / n,) int64, as `positions_by_rank` does."""
    raise NotImplementedError("return the positions of one rank's tokens, (s / n,)")


def positions_by_rank(seq_len: int, num_ranks: int, zigzag: bool) -> Tensor:
    """Return the positions of all ranks' tokens in the full sequence, (n, s / n) int64: row r is rank r's, ascending.

    Contiguous: rank r has the r-th of n equal parts. Zig-zag: the sequence is cut into 2n chunks, and rank r has chunk
    r from the front and chunk r from the back. A late query attends to more keys than an early one; with zig-zag all
    ranks have the same number of unmasked scores. (This ring computes the masked scores, too; the fast one skips them.)
    Raises ValueError if the sequence cannot be cut evenly.
    """
    raise NotImplementedError("return the positions of all ranks' tokens, (n, s / n)")
