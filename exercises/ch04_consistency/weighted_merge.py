"""The weighted merge of uneven replicas.

Replicas have trained by themselves, some of them on more samples than others. Overwrite the parameters of all ranks
by the weighted mean of all replicas.

parameters: this rank's, one flat tensor of any floating-point dtype. weight: this rank's w_i, 0 or more, such as the
number of tokens it has trained on. Example: on 3 ranks, parameters [1, 2], [9, 9] and [4, -4] with weights 1, 0 and 3
become [(1 + 3 * 4) / 4, (2 - 3 * 4) / 4] = [3.25, -2.5] on all three.

Checked: the mean on 1 to 4 ranks, to twelve digits in float64; that the results of all ranks are equal bit by bit; a
replica of weight 0, which does not count even if its values are NaN; weights that sum to 0, for which every rank
raises ValueError and no parameter changes; token counts as weights of 16-bit parameters, whose product with a weight
would overflow; and that the parameters are all-reduced once, and only a few bytes are sent besides.

You may call:
    all_reduce(tensor, group)   replaces the tensor by the sum over all ranks
    torch.tensor([number], dtype=torch.float64, device=parameters.device), Tensor.item()
    torch.zeros_like(tensor), Tensor.copy_(tensor)

Check it with: python -m exercises check weighted_merge

Stub 7cab392b.
"""

import torch
from torch import Tensor

from minidist.comm import Group, all_reduce


def merge_replicas(parameters: Tensor, weight: float, group: Group) -> None:
    """Collective: overwrite all ranks' parameters with sum_i w_i theta_i / sum_i w_i. weight: this rank's w_i >= 0.

    The weight may be the number of tokens that a replica has trained on. A replica of weight 0 does not count, even if
    its values are not finite. Raises ValueError on all ranks if the weights sum to 0.
    """
    raise NotImplementedError("overwrite the parameters of all ranks by their weighted mean")
