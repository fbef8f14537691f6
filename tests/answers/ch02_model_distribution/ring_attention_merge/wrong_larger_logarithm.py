"""two_parts_are_the_whole: the larger of the two logarithms is taken for that of the sum"""

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both, as (out, lse), in at least float32.

    out, other: (..., s, d), softmax-weighted values over disjoint sets of keys. lse, other_lse: (..., s), the logarithm
    of the sum of the exponentials of the scores over them; minus infinity, with out 0, where there were none.
    """
    dtype = torch.promote_types(out.dtype, torch.float32)
    lse, other_lse = lse.to(dtype), other_lse.to(dtype)
    ahead = (lse - other_lse).nan_to_num(nan=0.0)[..., None]
    return out * ahead.sigmoid() + other * (-ahead).sigmoid(), torch.maximum(lse, other_lse)
