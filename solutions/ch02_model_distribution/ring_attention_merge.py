"""Two softmaxes made one: the solution, as it stands in minidist.parallel.context.merge.

A softmax over all keys needs the sum over all keys, and nobody has all of them. But the mean over a part and the
logarithm of its sum are enough: means of two parts are averaged with the shares that the parts have of the sum. So
blocks may come in any order, one at a time, and each is forgotten once it is merged. The result is exact, up to
rounding.

Only the difference of two logarithms is used, which is small where both are large: e^1000 never appears. A rank that
has seen no key yet says minus infinity.

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
