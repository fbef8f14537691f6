"""Ring attention, backward: the solution, as it stands in minidist.simple.context_parallel.

Backward does not store the weights of forward: s / n times s numbers per head would be as much as context parallelism
is meant to avoid. One number per query, the log-sum-exp over all keys, is enough to compute any block's weights
again. The softmax couples all keys of a query by one sum, D, the sum of P dP over all keys. It equals grad . out,
because out is the sum of P times the values, so each rank computes it for its own queries without a message
(FlashAttention, Dao et al. 2022).

The gradient of a query needs the keys of all ranks, and stays with the query. The gradient of a key needs the queries
of all ranks, so it travels with the key, and each rank adds its term. A block has been everywhere after n - 1 hops;
its sums need one more to reach the owner. The fast trainer keeps the own term at home: its sums start one hop later,
and the keys and values are not sent home at all, so that both make n - 1 hops.

Usual wrong answers:
* collects the blocks of all ranks first
* keeps the weights of all blocks to the end
* averages the gradients of keys and values over the ranks in place of summing them
* the package's own
* clamps the scores before it subtracts the log-sum-exp
* returns one number for every result
* sends its block to every rank directly, and the gradients back: the messages cross the whole network
* all-gathers keys and values, and reduce-scatters the gradients of all of them
* returns the gradient of value before that of key
* leaves out the last hop, as in forward: a rank returns the gradients of the next rank's keys and values
* skips the blocks of later ranks and applies no mask to those of earlier ones: right for contiguous tokens only
* masks every block like the own one
* gives weights to later keys
* does not divide by the root of the head dimension
* divides exp(score) by exp(lse), which overflow or vanish
* takes the block that arrives for the one of the next rank: right on 1 and 2 ranks
* multiplies in the memory of the output, which the caller still needs
* uses this rank's own keys only, and keeps their gradients
* starts a block's sums at the next rank and leaves out the owner's own term
* sends the queries and their gradients with the blocks, although they stay
* sends float32, whatever the dtype is
* skips a block whose first key comes after the rank's last query, as if the rows were in ascending order
* computes the weights by a softmax over the block's keys: right on one rank
* subtracts the sum of P dP over the block's keys in place of the sum over all keys: right on one rank
* replaces a block's sums by its own term in place of adding it
* sends the blocks on without the sums of their gradients
* keeps the terms of the query's gradient until the end, one tensor for each rank
* sends every rank's term of a gradient to the owner by itself, hop by hop, in place of one sum
* computes the values' gradient from the score gradients in place of the weights
* forgets that a higher score lowers the other keys' weights: does not subtract grad . out
* returns zeros
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
