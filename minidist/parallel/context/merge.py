"""Attention over some of the keys, made up from attentions over fewer of them.

A softmax over all keys needs the sum of all exponentials. Whoever saw a part of the keys knows the sum of that part,
and says it as its logarithm (`lse`, the log-sum-exp of the scores), which does not overflow. Two such results are
averaged with the shares that each has of the sum of both. Milakov and Gimelshein 2018 (arXiv 1805.02867, section 3.1),
for blocks of keys Dao et al. 2022 (FlashAttention, arXiv 2205.14135, section 3.1), for blocks on other devices Liu et
al. 2023 (Ring Attention, arXiv 2310.01889, section 3).
"""

import torch
from torch import Tensor


def merge_attention(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both, as (out, lse), in at least float32.

    out, other: (..., s, d), softmax-weighted values over disjoint sets of keys. lse, other_lse: (..., s), the logarithm
    of the sum of the exponentials of the scores over them; minus infinity, with out 0, where there were none.
    """
    dtype = torch.promote_types(out.dtype, torch.float32)
    lse, other_lse = lse.to(dtype), other_lse.to(dtype)
    # The share of one, e^a / (e^a + e^b), is a function of the difference alone, which is exact where both are large;
    # the logarithm of their sum is not. Two that saw no key differ by NaN; their outputs are 0, whatever the shares.
    ahead = (lse - other_lse).nan_to_num(nan=0.0)[..., None]
    return out * ahead.sigmoid() + other * (-ahead).sigmoid(), torch.logaddexp(lse, other_lse)
