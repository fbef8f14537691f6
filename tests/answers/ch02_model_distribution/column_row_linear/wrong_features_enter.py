"""gradients_are_those_of_one_process: the output enters in the place of the input, and gradients of other features
are mixed into it
"""

import torch.nn.functional as F
from torch import Tensor, nn

from minidist.parallel.tensor.operators import Operator


class ColumnLinear(nn.Module):
    """This rank's output features of a linear layer: (b, s, in) -> (b, s, out / ranks).

    weight: (out / ranks, in). enter: what happens to the input first; nothing where several projections read one
    input, which has entered already: then its gradients are summed once.
    """

    def __init__(self, weight: Tensor, enter: Operator | None = None):
        super().__init__()
        self.weight, self._enter = nn.Parameter(weight), enter

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        return y if self._enter is None else self._enter(y)


class RowLinear(nn.Module):
    """A linear layer whose input features are shared out: (b, s, in / ranks) -> what `leave` makes of (b, s, out).

    weight: (out, in / ranks). leave: sums over the ranks.
    """

    def __init__(self, weight: Tensor, leave: Operator):
        super().__init__()
        self.weight, self._leave = nn.Parameter(weight), leave

    def forward(self, x: Tensor) -> Tensor:
        return self._leave(F.linear(x, self.weight))
