"""Which positions of a sequence each rank holds.

Everything but attention treats each position alone, so a rank computes it for its own positions only. Two layouts:

* contiguous: rank r holds the r-th of n equal parts.
* zigzag: the sequence is cut into 2n equal chunks and rank r holds chunks r and 2n - 1 - r (Llama 3, arXiv 2407.21783,
  section 3.3.2). Under the causal mask a late query sees more keys than an early one; with one chunk of either, every
  rank has equally much to compute (`causal`).

In both, a rank's positions ascend. They are an argument of the model, whose rotary angles and dropout masks are
functions of the position in the whole sequence; nothing else in the model depends on positions.
"""

import torch
from torch import Tensor

from minidist.parallel.context.chunks import num_chunks
from minidist.validation import validate_sequence_length


def rank_positions(layout: str, seq_len: int, size: int, rank: int) -> Tensor:
    """Return the positions of a rank's tokens in the full sequence: (seq_len / size,) int64, ascending.

    layout: "contiguous" or "zigzag". size: number of ranks that shard the sequence. Raises ValueError for an unknown
    layout, or one that cannot divide the sequence (`validate_sequence_length`).
    """
    validate_sequence_length(layout, seq_len, size)
    chunks = torch.arange(seq_len).view(num_chunks(layout, size), -1)
    return chunks[rank] if len(chunks) == size else torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))


def shard_sequence(tokens: Tensor, labels: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return a rank's tokens and labels, (b, s / ranks) each.

    tokens, labels: the full sequences, (b, s) int64; labels[i, t] is the token after tokens[i, t], which another rank
    may hold. positions: the rank's `rank_positions`, (s / ranks,).
    """
    positions = positions.to(tokens.device)
    return tokens.index_select(1, positions), labels.index_select(1, positions)
