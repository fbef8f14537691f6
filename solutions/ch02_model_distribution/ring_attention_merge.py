"""Merge two softmax results: the solution, as it stands in minidist.parallel.context.kernels.

A softmax over all keys needs the sum over all keys, and no rank has all of them. But the weighted mean over a block
of keys and the logarithm of the block's sum are enough: to merge two blocks, average their means, weighted by each
block's fraction of the total sum. So blocks may arrive in any order, one at a time, and each is freed after it has
been merged. The result is exact, up to rounding.

The formula uses only the difference of two logarithms, which is small where both are large: e^1000 is never computed.
The logarithm of a rank that has not seen a key yet is minus infinity.

Usual wrong answers:
* calls the package's function
* returns the first result unchanged
* writes the result into its arguments
* returns the larger logarithm instead of the logarithm of the sum
* averages both outputs with equal weights
* weights by the sums without dividing by their total
* returns NaN if both results have no key
* exponentials of large scores overflow
* rounds 16-bit outputs to 16 bits after every block
* adds the logarithms instead of the exponentials
* swaps the two weights
* returns zeros
"""

import torch
from torch import Tensor


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
