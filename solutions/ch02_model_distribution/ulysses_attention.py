"""Ulysses: attention sharded by heads: the solution, as it stands in minidist.simple.context_parallel.

Heads do not interact in attention, so a rank can compute attention for some heads alone, if it has all their tokens.
An all-to-all is a transpose over the ranks: before, a rank has all heads of some tokens, afterwards all tokens of
some heads. The gradient of a transpose is the transpose back.

Ranks send different tokens, and the tokens arrive in rank order; a causal mask by index needs them in the order of
their positions. positions.argsort() sorts them, and indexing with the positions themselves restores the rank order.
Without grouped heads, four tensors are exchanged, and a rank keeps 1 / n of each: the more ranks, the fewer bytes
each of them sends, but there are at most as many ranks as heads. Repeated key and value heads are sent several times;
the fast trainer repeats them only as often as the number of ranks demands.

Usual wrong answers:
* divides the gradients by the number of ranks
* the package's own
* finds out after it has sent something
* returns one number for every result
* gives a rank every n-th head or token in place of consecutive ones
* refuses fewer heads than ranks only
* computes and returns float64, whatever the dtype is
* all-gathers and keeps its own slice: n times the bytes
* passes the gradient on as it is, without an exchange
* joins the received slices along the dimension along which it cut
* does not repeat key and value heads, of which there may be fewer than ranks
* does not check the number of heads
* calls attend once per head
* exchanges every feature by itself
* sends the output back in the order of positions, not in rank order
* repeats the sequence of key heads in place of each head: query head 1 gets key head 1 and not 0
* attends to this rank's own tokens, without an exchange
* sends every tensor twice
* indexes with the positions where the inverse is needed, and with the inverse where the positions are: right on one
  rank
* calls attend with the tokens in rank order: right for contiguous tokens only
* joins the received slices in the opposite order of ranks
* sends float32, whatever the dtype is
* exchanges heads and tokens only, whatever the two dimensions are
* alternates what the ranks send, in place of one rank after the other
* returns zeros
"""

import torch
from torch import Tensor
from torch.autograd import Function

from minidist.comm import Group, all_to_all
from minidist.simple.context_parallel import positions_by_rank


class SwapShards(Function):
    """All-to-all in forward, and the opposite one in backward: the i-th slice along `split` goes to rank i.

    The slices that a rank receives are concatenated along `join`, in rank order.
    """

    @staticmethod
    def forward(ctx, x, split, join, group):
        ctx.split, ctx.join, ctx.group = split, join, group
        sent = torch.stack(x.chunk(group.size, split))
        received = torch.empty_like(sent)
        all_to_all(received, sent, group)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx, grad):
        return SwapShards.apply(grad, ctx.join, ctx.split, ctx.group), None, None, None


def ulysses_attention(query: Tensor, key: Tensor, value: Tensor, group: Group, attend, zigzag: bool = False) -> Tensor:
    """Collective: return causal attention over the whole sequence, (b, heads, s / n, d); arguments as `ring_attention`.

    attend: causal attention of complete sequences, from (b, heads / n, s, d). Raises ValueError if the ranks cannot
    divide the query heads.
    """
    if query.shape[1] % group.size:
        raise ValueError(f"{query.shape[1]} query heads cannot be shared by {group.size} ranks: use ring attention")
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    positions = positions_by_rank(query.shape[2] * group.size, group.size, zigzag).flatten().to(query.device)
    in_order = positions.argsort()
    query, key, value = (SwapShards.apply(x, 1, 2, group)[:, :, in_order] for x in (query, key, value))
    mixed = attend(query, key, value)  # (b, heads / n, s, d)
    return SwapShards.apply(mixed[:, :, positions], 2, 1, group)
