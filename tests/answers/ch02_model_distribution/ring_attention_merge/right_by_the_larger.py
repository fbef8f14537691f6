"""Both exponentials are taken after the larger logarithm has been subtracted."""

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both, as (out, lse), in at least float32.

    out, other: (..., s, d), softmax-weighted values over disjoint sets of keys. lse, other_lse: (..., s), the logarithm
    of the sum of the exponentials of the scores over them; minus infinity, with out 0, where there were none.
    """
    dtype = torch.promote_types(out.dtype, torch.float32)
    lse, other_lse = lse.to(dtype), other_lse.to(dtype)
    largest = torch.maximum(lse, other_lse)
    largest = torch.where(largest == -torch.inf, torch.zeros_like(largest), largest)
    a, b = (lse - largest).exp(), (other_lse - largest).exp()
    total = a + b
    share = torch.where(total > 0, a / total, total)[..., None]
    rest = torch.where(total > 0, b / total, total)[..., None]
    return out * share + other * rest, largest + total.log()
