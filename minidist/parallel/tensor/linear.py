"""A linear layer cut over ranks: by columns of the output, or by rows of the input.

Shoeybi et al. 2019, section 3: `Y = X A` with A cut by columns gives each rank some features of Y without a word
between them; a second matrix cut by rows takes just those, and the sum over ranks is the result. So a feed-forward
layer or an attention needs one all-reduce forward and one backward. torch stores A transposed, (out, in).
"""

import torch.nn.functional as F
from torch import Tensor, nn

from minidist.parallel.tensor.operators import Operator


class ColumnParallelLinear(nn.Module):
    """This rank's output features of a linear layer: (b, s, in) -> (b, s, out / ranks).

    weight: (out / ranks, in). enter: what happens to the input first; nothing where several projections read one
    input, which has entered already: then its gradients are summed once.
    """

    def __init__(self, weight: Tensor, enter: Operator | None = None):
        super().__init__()
        self.weight, self._enter = nn.Parameter(weight), enter

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x if self._enter is None else self._enter(x), self.weight)


class RowParallelLinear(nn.Module):
    """A linear layer whose input features are sharded: (b, s, in / ranks) -> what `leave` makes of (b, s, out).

    weight: (out, in / ranks). leave: sums over the ranks.
    """

    def __init__(self, weight: Tensor, leave: Operator):
        super().__init__()
        self.weight, self._leave = nn.Parameter(weight), leave

    def forward(self, x: Tensor) -> Tensor:
        return self._leave(F.linear(x, self.weight))
