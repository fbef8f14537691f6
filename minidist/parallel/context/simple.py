"""Context parallelism in one file: fp32 or fp64, all scores of a block in memory, nothing overlapped, no compilation.

Each of n ranks has s / n tokens of every sequence, at the positions of `rank_positions`. In ring attention (Liu et al.
2023, arXiv 2310.01889) keys and values go round the ring of ranks, while the queries stay. In Ulysses (Jacobs et al.
2023, arXiv 2309.14509) an all-to-all gives each rank all tokens of some heads. Both are exact, in forward and backward.
"""

from functools import partial

import torch
from torch import Tensor, nn

from minidist.comm import Group, P2POp, batch_send_recv
from minidist.comm import functional as ops
from minidist.parallel.context.chunks import resolve_layout
from minidist.parallel.context.layout import rank_positions


def all_positions(layout: str, local_len: int, group: Group) -> Tensor:
    """Return the positions of all ranks' tokens in the full sequence, (n, s / n) int64: row r is rank r's.

    layout: "contiguous" or "zigzag". local_len: tokens per rank, s / n.
    """
    return torch.stack([rank_positions(layout, local_len * group.size, group.size, r) for r in range(group.size)])


def send_to_next(x: Tensor, group: Group) -> Tensor:
    """Collective: send `x` to the next rank of the ring; return what the previous rank sent, of the same shape."""
    if group.size == 1 or x.numel() == 0:
        return x
    arriving, after, before = torch.empty_like(x), (group.rank + 1) % group.size, (group.rank - 1) % group.size
    batch_send_recv([P2POp("send", x, after), P2POp("recv", arriving, before)], group)
    return arriving


def causal_scores(query: Tensor, key: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """Return `query key^T / sqrt(d)`, (b, heads, q, k); minus infinity where the key's position is the later one.

    query: (b, heads, q, d). key: (b, heads, k, d). query_positions: (q,). key_positions: (k,).
    """
    scores = query @ key.mT / query.shape[-1] ** 0.5
    return scores.masked_fill((key_positions > query_positions[:, None]).to(scores.device), -torch.inf)


def ring_forward(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Collective: return the attention output of this rank's queries, and the log-sum-exp of each query's scores.

    query, key, value, output: (b, heads, s / n, d). log-sum-exp: (b, heads, s / n). positions: from `all_positions`.
    """
    out, lse = torch.zeros_like(query), torch.full_like(query[..., 0], -torch.inf)
    block = torch.stack((key, value))
    for step in range(group.size):
        source = (group.rank - step) % group.size
        scores = causal_scores(query, block[0], positions[group.rank], positions[source])
        # Every query sees its own key in step 0, so that `new_lse` is finite from then on.
        new_lse = torch.logaddexp(lse, scores.logsumexp(-1))
        out = out * (lse - new_lse).exp()[..., None] + (scores - new_lse[..., None]).exp() @ block[1]
        lse = new_lse
        if step < group.size - 1:
            block = send_to_next(block, group)
    return out, lse


def ring_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, positions: Tensor, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Collective: return the gradients of query, key and value.

    grad: gradient of the output. out, lse: the results of `ring_forward`. Other arguments as there. The gradients of a
    block's keys and values go round with it: each rank adds its term, and the last hop returns them to the owner.
    """
    from_outputs = (grad * out).sum(-1, keepdim=True)
    grad_query, block, grad_block = torch.zeros_like(query), torch.stack((key, value)), 0
    for step in range(group.size):
        source = (group.rank - step) % group.size
        weights = (causal_scores(query, block[0], positions[group.rank], positions[source]) - lse[..., None]).exp()
        grad_scores = weights * (grad @ block[1].mT - from_outputs) / query.shape[-1] ** 0.5
        grad_query += grad_scores @ block[0]
        grad_block = grad_block + torch.stack((grad_scores.mT @ query, weights.mT @ grad))
        block, grad_block = send_to_next(torch.stack((block, grad_block)), group)
    return grad_query, *grad_block


class RingAttention(torch.autograd.Function):
    """`ring_forward`, with `ring_backward` as its backward."""

    @staticmethod
    def forward(ctx, query, key, value, positions, group):
        """Return the output of `ring_forward`, which has the same arguments, and save what backward needs."""
        out, lse = ring_forward(query, key, value, positions, group)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.others = positions, group
        return out

    @staticmethod
    def backward(ctx, grad):
        """Return the gradients of query, key and value. grad: of the output, (b, heads, s / n, d)."""
        return *ring_backward(grad, *ctx.saved_tensors, *ctx.others), None, None


def ring_attention(query: Tensor, key: Tensor, value: Tensor, group: Group, layout: str) -> Tensor:
    """Collective: return causal attention of this rank's queries over the whole sequence; arguments as in the fast one.

    Key and value heads that serve several query heads are repeated before they are sent.
    """
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    return RingAttention.apply(query, key, value, all_positions(layout, query.shape[2], group), group)


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


def apply_context_parallel(model: nn.Module, group: Group, kind: str, layout: str | None = None) -> None:
    """Replace the attention of every layer of `model`, in place; arguments and errors as in the fast version."""
    layout = resolve_layout(kind, layout)
    for attention in (layer.self_attn for layer in model.model.layers if hasattr(layer, "self_attn")):
        attend = ring_attention if kind == "ring" else partial(ulysses_attention, attend=attention.attend)
        attention.attend = partial(attend, group=group, layout=layout)
