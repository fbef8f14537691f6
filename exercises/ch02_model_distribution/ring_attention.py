"""Ring attention, forward.

Each of n ranks has some tokens of a sequence. Write causal attention of its queries over the keys of all ranks: the
blocks of keys and values go round a ring, and a rank merges each block's result with its results so far.

query, key, value and the output: (b, heads, s / n, d), in one dtype, fp32 or fp64. The log-sum-exp of each query's
scores, (b, heads, s / n), in that dtype. positions: (n, s / n) int64; row r has the positions of rank r's tokens in the
sequence, in any layout. Arguments do not change. send_to_next takes and returns any shape and dtype. With one rank, or
no elements, it sends nothing and returns x. causal_scores returns (b, heads, q, k); merge_block takes the results over
earlier blocks and a block's scores, where a query may see none of the block's keys, and returns the results over both.
No earlier block: out is 0, and lse minus infinity; every query sees a key of the first block, which is its rank's own.
Example: 2 ranks with one token each, d = 1, all queries and keys 0, values 1 on rank 0 and 5 on rank 1.
    With positions [[0], [1]] rank 0 returns out 1 and lse log 1 = 0, rank 1 returns out 3 and lse log 2 = 0.6931.
    With positions [[1], [0]] rank 0 returns out 3 and lse 0.6931, rank 1 returns out 5 and lse 0.

Checked: output and log-sum-exp on 1 to 4 ranks against one process in float64, for four layouts and 1 to 6 tokens per
rank; causal_scores for any positions; merge_block for blocks of any size in any order; scores in the thousands; what
each rank sends, which is its block n - 1 times to one neighbour, in one message or several; what send_to_next sends and
returns; memory, which must not grow with the number of ranks; and float32, other strides and groups on 1 to 7 ranks.

You may call:
    batch_send_recv([P2POp("send", tensor, to), P2POp("recv", tensor, source)], group)   both at once; returns when done
    group.rank, group.size; Tensor.mT   the last two dimensions swapped; Tensor.masked_fill(mask, number)
    torch.stack((key, value))   one contiguous tensor, (2, ...); torch.empty_like, torch.zeros_like, torch.full_like
    torch.logaddexp(a, b)   log(exp(a) + exp(b)) without overflow; Tensor.logsumexp(dim), torch.maximum, torch.sigmoid

Check it with: python -m exercises check ring_attention

Stub 9f117399.
"""

import torch
from torch import Tensor

from minidist.comm import Group, P2POp, batch_send_recv


def send_to_next(x: Tensor, group: Group) -> Tensor:
    """Collective: send `x` to the next rank of the ring; return what the previous rank sent, of the same shape."""
    raise NotImplementedError("send x to the next rank, and return what the previous rank sent")


def causal_scores(query: Tensor, key: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """Return `query key^T / sqrt(d)`, (b, heads, q, k); minus infinity where the key comes after the query.

    query: (b, heads, q, d). key: (b, heads, k, d). query_positions: (q,). key_positions: (k,).
    """
    raise NotImplementedError("return the scores, minus infinity where the key comes after the query")


def merge_block(out: Tensor, lse: Tensor, scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Add one block of keys and values to the attention over earlier blocks; return the new `out` and `lse`.

    out: (b, heads, q, d), the attention output over the earlier blocks. lse: (b, heads, q), the logarithm of the sum of
    the exponentials of their scores. scores: (b, heads, q, k), of the new block. value: (b, heads, k, d).
    """
    raise NotImplementedError("return the output and the log-sum-exp over the earlier blocks and this one")


def ring_forward(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Collective: return the attention output of this rank's queries, and the log-sum-exp of their scores.

    query, key, value, output: (b, heads, s / n, d), of this rank's tokens. log-sum-exp: (b, heads, s / n). positions:
    from `positions_by_rank`. Sends each rank's keys and values n - 1 times.
    """
    raise NotImplementedError("return the output and the log-sum-exp over the keys of all ranks")
