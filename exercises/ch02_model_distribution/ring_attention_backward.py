"""Ring attention, backward.

Write the backward of ring attention: the gradients of this rank's queries, keys and values. The output and the
log-sum-exp of forward are given, so a block's weights are exp(score - lse). The gradients of keys and values go round
the ring with their block and return to the rank that owns it.

grad, query, key, value, out: (b, heads, s / n, d), in one dtype, fp32 or fp64; grad is the gradient of out. lse: (b,
heads, s / n), over all keys of the sequence. positions: (n, s / n) int64, row r those of rank r, in any layout. Returns
three new tensors, or views of one, the gradients of query, key and value, of their shapes and dtype. Arguments do not
change.
Example: 2 ranks with one token each, d = 1, positions [[0], [1]], all queries and all grad 1, keys 0 on rank 0 and
    log 3 on rank 1, values 1 and 5. The weights are [1] on rank 0 and [1/4, 3/4] on rank 1, so out is 1 and 4, lse 0
    and log 4. Rank 0 returns 0, -0.75 and 1.25; rank 1 returns 0.75 log 3 = 0.8240, 0.75 and 0.75.

Checked: the gradients on 1 to 4 ranks against autograd on one process in float64, for four layouts and 1 to 5 tokens
per rank; scores in the thousands; what each rank sends: at most n times its keys, values and their gradients, to its
neighbours only; memory, which must not grow with the number of ranks; and float32, other strides and groups on 1 to 7
ranks.

You may call:
    send_to_next(x, group)   sends x to the next rank; returns what the previous one sent, of the same shape; 2.12
    causal_scores(query, key, query_positions, key_positions)   (b, heads, q, k), minus infinity for hidden keys; 2.12
    group.rank, group.size; Tensor.exp(), Tensor.mT   the last two dimensions swapped
    torch.stack((key, value))   one contiguous tensor, (2, ...); torch.zeros_like; Tensor.sum(-1, keepdim=True)

Check it with: python -m exercises check ring_attention_backward

Stub 6e56e773.
"""

import torch
from torch import Tensor

from minidist.comm import Group
from minidist.simple.context_parallel import causal_scores, send_to_next


def ring_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, positions: Tensor, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Collective: return the gradients of this rank's query, key and value.

    grad: of the output. out, lse: the results of `ring_forward`. With P the softmax, O = P V and D = rowsum(dO * O):
    dV = P^T dO, dS = P * (dO V^T - D), dQ = dS K, dK = dS^T Q (Dao et al. 2022, arXiv 2205.14135, appendix B.4). The
    gradients of a block of keys and values go round with it: each rank adds its term, and the last hop returns them.
    """
    raise NotImplementedError("return the gradients of query, key and value")
