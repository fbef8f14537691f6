"""Ring attention, forward: the solution, as it stands in minidist.simple.context_parallel.

A softmax over all keys needs the sum over all keys, and no rank has all of them. But the weighted mean over a block
of keys and the logarithm of the block's sum are enough: to merge two blocks, average their means, weighted by each
block's fraction of the total sum. So blocks may arrive in any order, one at a time, and each is freed after it has
been merged. The result is exact, up to rounding. Only differences of two logarithms are exponentiated, so that e^1000
is never computed.

The last hop is missing on purpose: after n - 1 hops every rank has seen every block. The fast trainer sends the next
block while it computes with this one, and skips blocks that the mask hides.

Usual wrong answers:
* keeps the blocks of all ranks until it computes, so that memory grows with the number of ranks
* keeps the scores of all blocks, and applies one softmax in the end
* the package's own
* returns one number for every result
* all-gathers all keys and values, and computes everything at once
* divides by the sum of a block, which is zero for a query that sees none of its keys
* gives hidden keys a score of -10000 and not minus infinity, which counts beside scores that are lower
* sends the keys on, but not the values
* keeps the larger logarithm instead of the logarithm of the sum
* returns the log-sum-exp of the last block
* hides a block if its rank is the larger one, and shows it otherwise: right for contiguous tokens only
* masks every block like the own one
* averages the outputs of the blocks with equal weights
* takes the mean of the earlier output and the block's, with equal weights
* does not wait for its messages
* lets queries attend to later keys
* does not divide the scores by the root of the head dimension
* sums exponentials of the scores themselves, which overflow or vanish
* does not scale the earlier blocks' output down when a new block joins
* takes the block that arrives for the one of the next rank: right on 1 and 2 ranks
* sends before it computes, so that a query may meet only hidden keys first: minus infinity less minus infinity is NaN
* attends to this rank's own keys only
* hides a query's own key as well
* scales the queries in place and back: where one tensor is query and key, the keys are scaled, too
* sends the queries with the keys and values
* receives into the tensor that it sends
* returns a view of a longer tensor, which stays in memory as long as the result
* sends keys and values as float32, whatever their dtype
* sends tensors without elements as well
* sends to the previous rank, and receives from the next one
* skips a block whose first key comes after the rank's last query, as if the rows were in ascending order
* sends every block once more, back to its owner
* returns zeros
"""

import torch
from torch import Tensor

from minidist.comm import Group, P2POp, batch_send_recv


def send_to_next(x: Tensor, group: Group) -> Tensor:
    """Collective: send `x` to the next rank of the ring; return what the previous rank sent, of the same shape."""
    if group.size == 1 or x.numel() == 0:
        return x
    received = torch.empty_like(x)
    following, previous = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    # Both at once: if every rank sent first, and the sends waited for their receivers, all would wait forever.
    batch_send_recv([P2POp("send", x, following), P2POp("recv", received, previous)], group)
    return received


def causal_scores(query: Tensor, key: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """Return `query key^T / sqrt(d)`, (b, heads, q, k); minus infinity where the key comes after the query.

    query: (b, heads, q, d). key: (b, heads, k, d). query_positions: (q,). key_positions: (k,).
    """
    scores = query @ key.mT / query.shape[-1] ** 0.5
    is_later = (key_positions > query_positions[:, None]).to(scores.device)
    return scores.masked_fill(is_later, -torch.inf)


def merge_block(out: Tensor, lse: Tensor, scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Add one block of keys and values to the attention over earlier blocks; return the new `out` and `lse`.

    out: (b, heads, q, d), the attention output over the earlier blocks. lse: (b, heads, q), the logarithm of the sum of
    the exponentials of their scores. scores: (b, heads, q, k), of the new block. value: (b, heads, k, d).
    """
    new_lse = torch.logaddexp(lse, scores.logsumexp(-1))
    rescaled = out * (lse - new_lse).exp()[..., None]  # the earlier blocks now have a smaller share of the softmax
    return rescaled + (scores - new_lse[..., None]).exp() @ value, new_lse


def ring_forward(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Collective: return the attention output of this rank's queries, and the log-sum-exp of their scores.

    query, key, value, output: (b, heads, s / n, d), of this rank's tokens. log-sum-exp: (b, heads, s / n). positions:
    from `positions_by_rank`. Sends each rank's keys and values n - 1 times.
    """
    out = torch.zeros_like(query)
    lse = torch.full_like(query[..., 0], -torch.inf)
    block = torch.stack((key, value))
    for hop in range(group.size):
        owner = (group.rank - hop) % group.size  # the rank whose keys and values are here now
        scores = causal_scores(query, block[0], positions[group.rank], positions[owner])
        # In hop 0 every query sees at least its own key, so `lse` is finite from then on.
        out, lse = merge_block(out, lse, scores, block[1])
        if hop < group.size - 1:
            block = send_to_next(block, group)
    return out, lse
