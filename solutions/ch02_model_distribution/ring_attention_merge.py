"""Merge two softmax results: the solution, as it stands in minidist.parallel.context.merge.

A softmax over all keys needs the sum over all keys, and no rank has all of them. But the weighted mean over a block
of keys and the logarithm of the block's sum are enough: to merge two blocks, average their means, weighted by each
block's fraction of the total sum. So blocks may arrive in any order, one at a time, and each is freed after it has
been merged. The result is exact, up to rounding.

The formula uses only the difference of two logarithms, which is small where both are large: e^1000 is never computed.
The logarithm of a rank that has not seen a key yet is minus infinity.

Usual wrong answers:
* the package's own
* what was there already, whatever comes
* the result is written over what was given
* the larger of the two logarithms is taken for that of the sum
* the mean of both, whatever their sums
* weighted by the sums, and not divided by both
* of two parts that saw no key the share is not a number
* exponentials of large scores are infinite
* 16-bit outputs are rounded to 16 bits after every block
* the logarithms are added, not what they are logarithms of
* each has the share of the other
* zeros
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
