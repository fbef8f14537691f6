"""Zig-zag: equal work for all ranks: the solution, as it stands in minidist.simple.context_parallel.

The query at position p attends to p + 1 keys. A chunk from the front and its mirror image from the back always have
the same number of scores together, so every rank computes equally much; and in each hop of the ring, too, since a
rank computes half of the scores with the keys of any other rank. With contiguous parts rank 0 is idle in all hops but
the first, and the time of the ring is that of the last rank: nearly twice as long.

Everything that depends on the position must know the layout: the mask, rotary angles, dropout masks and the choice of
the labels. The trainer asks this one function.

Usual wrong answers:
* ignores the layout
* puts the chunk from the back before the one from the front
* the package's own
* checks the number of ranks, and not that of chunks
* returns one number everywhere
* flips the tokens inside of the chunks from the back as well
* gives a rank two neighbouring chunks, which together are one contiguous part
* wants an even number of tokens on one rank
* returns the positions of rank 0 to every rank
* leaves out the tokens that do not fit
* gives rank r the chunks r and n + r: late ranks have late chunks twice
* returns zeros
"""

import torch
from torch import Tensor


def rank_positions(seq_len: int, num_ranks: int, rank: int, zigzag: bool) -> Tensor:
    """Return the positions of one rank's tokens, (s / n,) int64, as `positions_by_rank` does."""
    return positions_by_rank(seq_len, num_ranks, zigzag)[rank]


def positions_by_rank(seq_len: int, num_ranks: int, zigzag: bool) -> Tensor:
    """Return the positions of all ranks' tokens in the full sequence, (n, s / n) int64: row r is rank r's, ascending.

    Contiguous: rank r has the r-th of n equal parts. Zig-zag: the sequence is cut into 2n chunks, and rank r has chunk
    r from the front and chunk r from the back. A late query attends to more keys than an early one; with zig-zag all
    ranks have the same number of unmasked scores. (This ring computes the masked scores, too; the fast one skips them.)
    Raises ValueError if the sequence cannot be cut evenly.
    """
    num_chunks = 2 * num_ranks if zigzag and num_ranks > 1 else num_ranks
    if seq_len % num_chunks:
        raise ValueError(f"seq_len={seq_len} cannot be cut into {num_chunks} equal chunks for cp={num_ranks}")
    chunks = torch.arange(seq_len).view(num_chunks, -1)
    if num_chunks == num_ranks:
        return chunks
    front, back = chunks[:num_ranks], chunks.flip(0)[:num_ranks]
    return torch.cat((front, back), 1)
