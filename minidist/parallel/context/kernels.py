"""Attention over one block of keys: output, log-sum-exp and gradients, and the merge of two blocks' outputs.

A softmax over all keys needs the sum of all exponentials. A block's sum is kept as its logarithm (`lse`, the
log-sum-exp of the scores), which does not overflow; two blocks' outputs are averaged by each block's fraction of the
sum of both. Milakov and Gimelshein 2018 (arXiv 1805.02867, section 3.1); for blocks of keys Dao et al. 2022
(FlashAttention, arXiv 2205.14135, section 3.1).

Backward needs no scores of other blocks. `P = exp(S - lse)` with the lse of all keys is a block's share of the whole
softmax, and `dS = P * (grad V^T - D)` with `D = rowsum(grad * out)` of the whole output its gradient: Dao et al. 2022
(FlashAttention, arXiv 2205.14135, algorithm 4). So the fused kernels' own backward gives a block's contribution when it
is handed the merged output and lse instead of the block's own.

    ======================  =================================================
    where                   kernel
    ======================  =================================================
    CPU                     flash attention for CPU, any floating dtype
    CUDA, 16 bits           flash attention; before Ampere efficient attention
    CUDA, float32           efficient attention
    elsewhere               written out, with the scores in memory
    ======================  =================================================

The signatures of torch 2.11 to 2.13 are the same. Those on CUDA were tried on meta tensors only, without a GPU.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten
_ALIGNED_FEATURES = 8  # what the CUDA kernels ask of a head's width
_ALIGNED_LSE = 32  # efficient attention fills the lse up to a multiple of this


def attention_forward(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the attention output (b, heads, q, d), and each query's log-sum-exp of its scores (b, heads, q).

    The log-sum-exp is at least float32. query: (b, heads, q, d). key, value: (b, kv_heads, k, d); consecutive query
    heads attend to the same key head. Scores are divided by sqrt(d). causal: query i attends to keys 0 to i; q must
    equal k.
    """
    repeats = query.shape[1] // key.shape[1]
    return _kernels(query)[0](query, _repeat_heads(key, repeats), _repeat_heads(value, repeats), causal)


def attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value for one block of keys; for query, only this block's term.

    grad: gradient of the output, (b, heads, q, d). out, lse: results of `attention_forward`, merged over all keys that
    the queries attend to, this block included. query, key, value, causal: as in `attention_forward`. The gradients have
    the shapes of query, key and value; key and value gradients are summed over the query heads that share a key head.
    """
    kv_heads = key.shape[1]
    repeats = query.shape[1] // kv_heads
    grads = _kernels(query)[1](
        grad, query, _repeat_heads(key, repeats), _repeat_heads(value, repeats), out, lse, causal
    )
    if repeats == 1:
        return grads
    dtype = torch.promote_types(query.dtype, torch.float32)
    dkey, dvalue = (g.unflatten(1, (kv_heads, repeats)).sum(2, dtype=dtype) for g in grads[1:])
    return grads[0], dkey, dvalue


def merge_attention(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two attention results over disjoint sets of keys; return (out, lse) over all keys, in at least float32.

    out, other: (..., s, d), the softmax-weighted means of the values. lse, other_lse: (..., s), the log-sum-exp of the
    scores. Where a query has no key in a set, lse is minus infinity and out is 0; both sets may lack keys.
    """
    dtype = torch.promote_types(out.dtype, torch.float32)
    lse, other_lse = lse.to(dtype), other_lse.to(dtype)
    # The share of one, e^a / (e^a + e^b), is a function of the difference alone, which is exact where both are large;
    # the logarithm of their sum is not. Two that saw no key differ by NaN; their outputs are 0, whatever the shares.
    ahead = (lse - other_lse).nan_to_num(nan=0.0)[..., None]
    return out * ahead.sigmoid() + other * (-ahead).sigmoid(), torch.logaddexp(lse, other_lse)


def _repeat_heads(heads: Tensor, repeats: int) -> Tensor:
    """Repeat each key or value head (b, kv_heads, k, d) once per query head that attends to it, for the kernels."""
    return heads if repeats == 1 else heads.repeat_interleave(repeats, dim=1)


def _kernels(query: Tensor) -> tuple[Callable, Callable]:
    """Return the kernel and its backward for the device and dtype of `query`."""
    if query.device.type == "cpu":
        return _cpu_forward, _cpu_backward
    if query.device.type == "cuda" and query.dtype != torch.float64:
        ampere = torch.cuda.get_device_capability(query.device) >= (8, 0)
        if query.dtype != torch.float32 and ampere:
            return _flash_forward, _flash_backward
        return _efficient_forward, _efficient_backward
    return _written, _written_backward


def _cpu_forward(query, key, value, causal):
    return _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)


def _cpu_backward(grad, query, key, value, out, lse, causal):
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, query, key, value, out, lse, 0.0, causal)


def _flash_forward(query, key, value, causal):
    width = query.shape[-1]
    scale = query.shape[-1] ** -0.5
    query, key, value = map(_pad_features, (query, key, value))
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    return out[..., :width], lse


def _flash_backward(grad, query, key, value, out, lse, causal):
    width = query.shape[-1]
    scale = query.shape[-1] ** -0.5
    wide = map(_pad_features, (grad, query, key, value, out))
    # Random numbers are for dropout, of which there is none here; starts of sequences for batches of several lengths.
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
    grads = _aten._scaled_dot_product_flash_attention_backward(
        *wide, lse.contiguous(), None, None, query.shape[2], key.shape[2], 0.0, causal, seed, seed[:0], scale=scale
    )
    return tuple(g[..., :width] for g in grads)


def _efficient_forward(query, key, value, causal):
    width = query.shape[-1]
    scale = query.shape[-1] ** -0.5
    wide = map(_pad_features, (query, key, value))
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(*wide, None, True, 0.0, causal, scale=scale)
    return out[..., :width], lse[..., : query.shape[2]]


def _efficient_backward(grad, query, key, value, out, lse, causal):
    width = query.shape[-1]
    scale = query.shape[-1] ** -0.5
    grad, query, key, value, out = map(_pad_features, (grad, query, key, value, out))
    # With an infinite lse, what is filled up has shares of 0.
    lse = F.pad(lse, (0, -lse.shape[-1] % _ALIGNED_LSE), value=torch.inf).contiguous()
    seed = torch.zeros((), dtype=torch.int64, device=query.device)
    grads = _aten._scaled_dot_product_efficient_attention_backward(
        grad, query, key, value, None, out, lse, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
    )
    return tuple(g[..., :width] for g in grads[:3])


def _pad_features(x: Tensor) -> Tensor:
    """Pad each head with zeros to a multiple of 8 features, as CUDA's kernels require; scores do not change."""
    return F.pad(x, (0, -x.shape[-1] % _ALIGNED_FEATURES))


def _written(query, key, value, causal):
    """Attention without a fused kernel, with the scores in memory: return output and log-sum-exp."""
    scores = _masked_scores(query, key, causal)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ value.to(scores.dtype)).to(query.dtype), lse


def _written_backward(grad, query, key, value, out, lse, causal):
    """Backward of `_written`: return the gradients of query, key and value."""
    shares = (_masked_scores(query, key, causal) - lse[..., None]).exp()  # (b, heads, q, k)
    grad, query_, key_, value, out = (x.to(shares.dtype) for x in (grad, query, key, value, out))
    along = (grad * out).sum(-1, keepdim=True)
    dscores = shares * (grad @ value.transpose(-1, -2) - along) * query.shape[-1] ** -0.5
    grads = dscores @ key_, dscores.transpose(-1, -2) @ query_, shares.transpose(-1, -2) @ grad
    return tuple(g.to(query.dtype) for g in grads)


def _masked_scores(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    """Return the scores `query key^T / sqrt(d)`, at least float32; minus infinity for later keys if `causal`."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(dtype) @ key.to(dtype).transpose(-1, -2) * query.shape[-1] ** -0.5
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores
