"""Ulysses: attention sharded by heads.

Each of n ranks has some tokens of a sequence, with all heads. Exchange heads for tokens with an all-to-all, so that
each rank has all tokens of 1 / n of the heads; compute attention there, and exchange back.

SwapShards.apply(x, split, join, group): cuts x into n equal slices along dimension `split`, sends slice i to rank i,
and concatenates the n slices that it receives along dimension `join`, in rank order. So split 1 and join 2 turn
(b, heads, s / n, d) into (b, heads / n, s, d). Its backward exchanges the gradient the opposite way. ulysses_attention:
query, (b, heads, s / n, d), and key and value, (b, kv_heads, s / n, d), of this rank's tokens; fp32 or fp64. kv_heads
divides heads, and consecutive query heads share a key head, which is repeated before or after it is sent, or in attend.
It calls attend(query, key, value) once, with the tokens in the order of their positions, and returns attention of this
rank's queries, in the shape of query. Raises ValueError, before it sends anything, if n does not divide heads.
Example: 2 ranks, 4 tokens, 2 heads, d = 1, zigzag: rank 0 has the positions 0 and 3, rank 1 has 1 and 2. The value of
    head h at position p is 10 h + p: [[0, 3], [10, 13]] on rank 0, [[1, 2], [11, 12]] on rank 1.
    SwapShards gives [[0, 3, 1, 2]] on rank 0 and [[10, 13, 11, 12]] on rank 1; attend gets the values [[0, 1, 2, 3]]
    and [[10, 11, 12, 13]]. If all scores are equal, the results are [[0, 1.5], [10, 11.5]] on rank 0 and
    [[0.5, 1], [10.5, 11]] on rank 1.

Checked: output and gradients on 1 to 4 ranks against one process in float64, for both layouts and 1, 2, 4 and 12 key
heads; SwapShards both ways with its gradient; what attend gets; the ValueError; that forward and backward each make at
most four all-to-alls of a query's size and send nothing else; and float32, other strides and groups on 1 to 7 ranks.

You may call:
    all_to_all(received, sent, group)   sends sent[i] to rank i, whose part arrives in received[i]; both contiguous
    Tensor.chunk(n, dim)   n equal slices, as views; torch.stack, torch.empty_like, torch.cat(parts, dim)
    SwapShards.apply(x, split, join, group)   the function with its backward; ctx keeps what backward needs
    positions_by_rank(s, n, zigzag)   (n, s / n) int64, row r the positions of rank r's tokens: 2.14; Tensor.argsort()
    Tensor.repeat_interleave(times, dim)   each index `times` in succession; group.rank, group.size

Check it with: python -m exercises check ulysses_attention

Stub a675a4dd.
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
        raise NotImplementedError("send slice i along `split` to rank i; return the received ones along `join`")

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError("exchange the gradient the opposite way; None for the other arguments")


def ulysses_attention(query: Tensor, key: Tensor, value: Tensor, group: Group, attend, zigzag: bool = False) -> Tensor:
    """Collective: return causal attention over the whole sequence, (b, heads, s / n, d); arguments as `ring_attention`.

    attend: causal attention of complete sequences, from (b, heads / n, s, d). Raises ValueError if the ranks cannot
    divide the query heads.
    """
    raise NotImplementedError("return attention of this rank's queries over the whole sequence")
