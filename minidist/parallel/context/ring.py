"""Ring attention: blocks of keys and values go round the ring of ranks, while the queries stay.

Liu, Zaharia and Abbeel 2023 (arXiv 2310.01889, section 3). In step t rank r attends to the keys of rank r - t and
merges the result into its output (`merge_attention`), while the next block arrives: the transfer is overlapped if it
takes no longer than the attention. Fully masked blocks are skipped; in the zig-zag layout each rank then computes
equally much in each step (`causal`).

Backward runs the ring again. The gradients of a block's keys and values follow the block, and each rank adds its term:
they start at the rank after the block's owner, one step behind the block, and the last of n - 1 hops returns them to
the owner, which adds its own term. They are at least float32: for 16-bit keys twice as many bytes.

In memory at one time: this rank's own part, one block at hand and one arriving, and as many gradients. Nothing grows
with the whole sequence. What is kept for backward is this rank's own part: query, key, value, output and lse.

The two passes are `torch.library` ops, as the collectives are, so a block that calls them compiles as one graph.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minidist.comm import Group, P2POp, batch_send_recv
from minidist.comm.group import find_group
from minidist.parallel.context import kernels
from minidist.parallel.context.causal import ScoreBlock, score_block


def ring_attention(query: Tensor, key: Tensor, value: Tensor, group: Group, layout: str) -> Tensor:
    """Collective: return causal attention of this rank's queries over the keys of the full sequence; shape of query.

    query: (b, heads, s / ranks, d). key, value: (b, kv_heads, s / ranks, d); consecutive query heads attend to the same
    key head, and keys and values are sent with kv_heads heads. group: the ranks that shard the sequence. layout: which
    positions each rank has, "contiguous" or "zigzag".
    """
    return _ring(query, key, value, group.key, layout)[0]


@torch.library.custom_op("minidist::ring_attention", mutates_args=())
def _ring(query: Tensor, key: Tensor, value: Tensor, group: str, layout: str) -> tuple[Tensor, Tensor]:
    return ring_forward(query, key, value, find_group(group), layout)


@torch.library.custom_op("minidist::ring_attention_backward", mutates_args=())
def _ring_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, group: str, layout: str
) -> tuple[Tensor, Tensor]:
    return ring_backward(grad, query, key, value, out, lse, find_group(group), layout)


def ring_forward(query: Tensor, key: Tensor, value: Tensor, group: Group, layout: str) -> tuple[Tensor, Tensor]:
    """Collective: return the output of ring attention, and each query's log-sum-exp of its scores over all keys.

    The log-sum-exp is (b, heads, s / ranks), at least float32. Arguments as in `ring_attention`.
    """
    out, lse = _attention_to_nothing(query)
    held = torch.stack((key, value))
    for step in range(group.size):
        hop = RingTransfer([held] if step < group.size - 1 else [], group)
        _merge_attention_to_block(_score_block_of_step(query, group, layout, step), query, held, out, lse)
        held = hop.wait()[0] if step < group.size - 1 else None
    return out.to(query.dtype), lse


def ring_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, group: Group, layout: str
) -> tuple[Tensor, Tensor]:
    """Collective: return two gradients: of query, and of key and value stacked in one tensor, (2, *key.shape).

    grad: gradient of the output. out, lse: the results of `ring_forward`. Other arguments as in `ring_attention`.
    """
    held = torch.stack((key, value))
    dtype = torch.promote_types(query.dtype, torch.float32)
    dquery = torch.zeros_like(query, dtype=dtype)
    home = torch.zeros_like(held, dtype=dtype)
    sums = home  # of the block at hand: the first is this rank's own
    for step in range(group.size):
        leaving = [held] if step < group.size - 1 else []
        # Step 1 begins new sums, for the block of the rank before; from step 2 on they follow the blocks.
        hop = RingTransfer(leaving + ([sums] if step > 1 else []), group)
        what = _score_block_of_step(query, group, layout, step)
        share = _block_gradients(what, grad, query, held, out, lse, dquery)
        arrived = hop.wait()
        held = arrived.pop(0) if leaving else None
        if step > 0:
            sums = arrived.pop() if arrived else torch.zeros_like(home)
        for whole, block in zip(sums, share, strict=False):
            whole[..., what.keys, :] += block
    if group.size > 1:
        home += RingTransfer([sums], group).wait()[0]
    return dquery.to(query.dtype), home.to(key.dtype)


class RingTransfer:
    """Sends tensors to the next rank of the ring, and receives as many from the previous rank, in the background.

    leaving: the tensors to send. The constructor launches all sends and receives as one batch, as NCCL requires of
    transfers that overlap.
    """

    def __init__(self, leaving: Sequence[Tensor], group: Group):
        self._arriving = [torch.empty_like(tensor) for tensor in leaving]
        after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        transfers = [P2POp("send", tensor, after) for tensor in leaving if tensor.numel()]
        transfers += [P2POp("recv", tensor, before) for tensor in self._arriving if tensor.numel()]
        self._handle = batch_send_recv(transfers, group, async_op=True)

    def wait(self) -> list[Tensor]:
        """Wait for all transfers; return the received tensors, in the order and shapes of `leaving`."""
        self._handle.wait()
        return self._arriving


def _score_block_of_step(query: Tensor, group: Group, layout: str, step: int) -> ScoreBlock | None:
    """Return the scores that this rank computes in a step of the ring; None if the causal mask hides all."""
    return score_block(layout, group.rank, (group.rank - step) % group.size, query.shape[2])


def _merge_attention_to_block(what: ScoreBlock | None, query: Tensor, held: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge attention to one block of keys and values into the running `out` and `lse`, in place.

    what: the scores to compute; None: nothing. held: the block's keys and values, (2, b, kv_heads, s, d).
    """
    if what is None:
        return
    k, v = held[..., what.keys, :]
    block = kernels.attention_forward(query[..., what.queries, :], k, v, what.causal)
    rows, row_lse = out[..., what.queries, :], lse[..., what.queries]
    for there, merged in zip((rows, row_lse), kernels.merge_attention(rows, row_lse, *block), strict=True):
        there.copy_(merged)


def _block_gradients(what: ScoreBlock | None, grad, query, held, out, lse, dquery) -> tuple[Tensor, ...]:
    """Return a block's terms of its key and value gradients, () if it is masked; add its term of `dquery` in place.

    Arguments as in `_merge_attention_to_block` and `ring_backward`.
    """
    if what is None:
        return ()
    k, v = held[..., what.keys, :]
    grad, query, out = (x[..., what.queries, :] for x in (grad, query, out))
    share, *others = kernels.attention_backward(grad, query, k, v, out, lse[..., what.queries], what.causal)
    dquery[..., what.queries, :] += share
    return tuple(others)


def _attention_to_nothing(query: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output, zeros, and the log-sum-exp, minus infinity, of attention to no key: where merging starts.

    The output's memory layout is (b, s, heads, d), as the output projection reads it.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    b, heads, s, d = query.shape
    out = torch.zeros((b, s, heads, d), dtype=dtype, device=query.device).transpose(1, 2)
    return out, torch.full((b, heads, s), -torch.inf, dtype=dtype, device=query.device)


@_ring.register_fake
def _(query, key, value, group, layout):
    out, lse = _attention_to_nothing(query)
    return out.to(query.dtype), lse


@_ring_backward.register_fake
def _(grad, query, key, value, out, lse, group, layout):
    return torch.empty_like(query), key.new_empty((2, *key.shape))


def _save_for_backward(ctx, inputs, output):
    *tensors, ctx.group, ctx.layout = inputs
    ctx.save_for_backward(*tensors, *output)


def _autograd_backward(ctx, grad, _):
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    dquery, dkv = _ring_backward(grad, *ctx.saved_tensors, ctx.group, ctx.layout)
    return dquery, *dkv, None, None


_ring.register_autograd(_autograd_backward, setup_context=_save_for_backward)
