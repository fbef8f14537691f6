"""Context parallelism: the ranks of a group share every sequence, each with s / n of its tokens.

Only attention needs the other ranks' tokens. In ring attention (Liu et al. 2023, arXiv 2310.01889) keys and values go
round the ring of ranks, while the queries stay; in Ulysses (Jacobs et al. 2023, arXiv 2309.14509) an all-to-all gives
each rank all tokens of some heads. Both are exact, in forward and backward.

Shapes: b samples, s tokens, d features of a head, n ranks.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import Function

from minidist.comm import Group, P2POp, all_to_all, batch_send_recv


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


def rank_positions(seq_len: int, num_ranks: int, rank: int, zigzag: bool) -> Tensor:
    """Return the positions of one rank's tokens, (s / n,) int64, as `positions_by_rank` does."""
    return positions_by_rank(seq_len, num_ranks, zigzag)[rank]


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


def ring_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, positions: Tensor, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Collective: return the gradients of this rank's query, key and value.

    grad: of the output. out, lse: the results of `ring_forward`. With P the softmax, O = P V and D = rowsum(dO * O):
    dV = P^T dO, dS = P * (dO V^T - D), dQ = dS K, dK = dS^T Q (Dao et al. 2022, arXiv 2205.14135, appendix B.4). The
    gradients of a block of keys and values go round with it: each rank adds its term, and the last hop returns them.
    """
    scale = query.shape[-1] ** -0.5
    row_sums = (grad * out).sum(-1, keepdim=True)  # D
    grad_query = torch.zeros_like(query)
    block = torch.stack((key, value))
    grad_block = torch.zeros_like(block)
    for hop in range(group.size):
        owner = (group.rank - hop) % group.size
        scores = causal_scores(query, block[0], positions[group.rank], positions[owner])
        weights = (scores - lse[..., None]).exp()  # P, recomputed
        grad_scores = weights * (grad @ block[1].mT - row_sums) * scale
        grad_query += grad_scores @ block[0]
        grad_block[0] += grad_scores.mT @ query
        grad_block[1] += weights.mT @ grad
        block, grad_block = send_to_next(torch.stack((block, grad_block)), group)
    return grad_query, grad_block[0], grad_block[1]


class RingAttention(Function):
    """Causal attention of this rank's queries over the whole sequence, with keys and values passed round the ring."""

    @staticmethod
    def forward(ctx, query, key, value, positions, group):
        out, lse = ring_forward(query, key, value, positions, group)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.positions, ctx.group = positions, group
        return out

    @staticmethod
    def backward(ctx, grad):
        return *ring_backward(grad, *ctx.saved_tensors, ctx.positions, ctx.group), None, None


def ring_attention(query: Tensor, key: Tensor, value: Tensor, group: Group, zigzag: bool = True) -> Tensor:
    """Collective: return causal attention over the whole sequence, (b, heads, s / n, d), on n ranks.

    query: (b, heads, s / n, d). key, value: (b, kv_heads, s / n, d), on which several heads of `query` may depend. All
    have the positions of this rank in `positions_by_rank(s, n, zigzag)`. Computed in at least float32.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    wide = torch.promote_types(query.dtype, torch.float32)
    positions = positions_by_rank(query.shape[2] * group.size, group.size, zigzag)
    return RingAttention.apply(query.to(wide), key.to(wide), value.to(wide), positions, group).to(query.dtype)


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


def apply_context_parallel(model: nn.Module, group: Group, kind: str) -> None:
    """Replace the attention of every layer of a Transformer, in place. kind: "ring" (zig-zag) or "ulysses"."""
    for layer in model.model.layers:
        if isinstance(layer, nn.Identity):  # on another pipeline stage
            continue
        if kind == "ring":
            layer.self_attn.attend = partial(ring_attention, group=group)
        else:
            layer.self_attn.attend = partial(ulysses_attention, group=group, attend=layer.self_attn.attend)
