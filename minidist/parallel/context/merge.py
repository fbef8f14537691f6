"""Attention over some of the keys, made up from attentions over fewer of them.

A softmax over all keys needs the sum of all exponentials. Whoever saw a part of the keys knows the sum of that part,
and says it as its logarithm (`lse`, the log-sum-exp of the scores), which does not overflow. Two such results are
averaged with the shares that each has of the sum of both. Milakov and Gimelshein 2018 (arXiv 1805.02867, section 3.1),
for blocks of keys Dao et al. 2022 (FlashAttention, arXiv 2205.14135, section 3.1), for blocks on other devices Liu et
al. 2023 (Ring Attention, arXiv 2310.01889, section 3).
"""

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both, as (out, lse), in at least float32.

    out, other: (..., s, d), softmax-weighted values over disjoint sets of keys. lse, other_lse: (..., s), the logarithm
    of the sum of the exponentials of the scores over them; minus infinity, with out 0, where there were none.
    """
    dtype = torch.promote_types(out.dtype, torch.float32)
    lse, other_lse = lse.to(dtype), other_lse.to(dtype)
    both = torch.logaddexp(lse, other_lse)
    # Where neither saw a key, minus infinity less itself would be NaN; any finite number makes both shares 0.
    base = both.masked_fill(both == -torch.inf, 0)
    share, other_share = (lse - base).exp()[..., None], (other_lse - base).exp()[..., None]
    return out * share + other * other_share, both
