"""Ulysses: attention sharded by heads: the solution, as it stands in minidist.parallel.context.simple.

Heads do not interact in attention, so a rank can compute attention for some heads alone, if it has all their tokens.
An all-to-all is a transpose over the ranks: before, a rank has all heads of some tokens, afterwards all tokens of
some heads. The gradient of a transpose is the transpose back, so backward needs no code of its own.

Ranks send different tokens, and the tokens arrive in rank order; a causal mask by index needs them in the order of
their positions. positions.argsort() sorts them, and indexing with the positions themselves restores the rank order.
Without grouped heads, four tensors are exchanged, and a rank keeps 1 / n of each: the more ranks, the fewer bytes
each of them sends, but there are at most as many ranks as heads. Repeated key and value heads are sent several times;
the fast version repeats them only as often as the number of ranks demands.

Usual wrong answers:
* all-gathers all tokens of all heads, computes everything on every rank, and keeps its own tokens
* divides the gradients by the number of ranks
* the package's own
* finds out after it has sent something
* returns one number for every result
* gives a rank every n-th head in place of consecutive ones, in both directions
* refuses fewer heads than ranks only
* computes and returns float64, whatever the dtype is
* all-gathers the tokens and keeps its own heads: n times the bytes
* passes the gradient on as it is, without an all-to-all
* does not repeat key and value heads, of which there may be fewer than ranks
* does not check the number of heads: torch's error names no reason
* calls the collective that autograd does not see: query, key and value get no gradient
* calls attend once per head
* exchanges every head by itself
* sends the output back in the order of positions, not in rank order
* repeats the sequence of key heads in place of each head: query head 1 gets key head 1 and not 0
* attends to this rank's own tokens, without an exchange
* sends every tensor twice
* indexes with the positions where the inverse is needed, and with the inverse where the positions are: right on one
  rank
* calls attend with the tokens in rank order: right for contiguous tokens only
* joins the received parts in the opposite order of ranks
* reshapes the received parts without moving the ranks' dimension to the tokens
* sends float32, whatever the dtype is
* alternates the tokens of the ranks, in both directions
* returns zeros
"""

from torch import Tensor

from minidist.comm import Group
from minidist.comm import functional as ops
from minidist.parallel.context.simple import all_positions


def sequence_to_heads(x: Tensor, group: Group) -> Tensor:
    """Collective: (b, heads, s / n, d) of this rank's tokens -> (b, heads / n, s, d), all tokens in rank order."""
    received = ops.all_to_all(x.unflatten(1, (group.size, -1)).movedim(1, 0), group.key)
    return received.movedim(0, 2).flatten(2, 3)


def heads_to_sequence(x: Tensor, group: Group) -> Tensor:
    """Collective: the inverse of `sequence_to_heads`, (b, heads / n, s, d) -> (b, heads, s / n, d)."""
    received = ops.all_to_all(x.unflatten(2, (group.size, -1)).movedim(2, 0), group.key)
    return received.movedim(0, 1).flatten(1, 2)


def ulysses_attention(query: Tensor, key: Tensor, value: Tensor, attend, group: Group, layout: str) -> Tensor:
    """Collective: return causal attention of this rank's queries over the whole sequence; arguments as in the fast one.

    attend: causal attention of whole sequences in order. Key and value heads are repeated as in `ring_attention`.
    Raises ValueError if n does not divide the number of query heads.
    """
    if query.shape[1] % group.size:
        raise ValueError(f"{query.shape[1]} query heads cannot be sharded over {group.size} ranks: use ring attention")
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    positions = all_positions(layout, query.shape[2], group).flatten().to(query.device)
    whole = (sequence_to_heads(x, group)[:, :, positions.argsort()] for x in (query, key, value))
    return heads_to_sequence(attend(*whole)[:, :, positions], group)
