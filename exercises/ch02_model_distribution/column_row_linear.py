"""Column-parallel and row-parallel linear layers.

Write the missing lines of ColumnParallelLinear and RowParallelLinear; its docstring specifies the result.
You may call: F.linear, enter, leave.
Check it with: python -m exercises check column_row_linear

Stub e7552f5f.
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
        raise NotImplementedError("return this rank's features of the output, (b, s, out / ranks)")


class RowParallelLinear(nn.Module):
    """A linear layer whose input features are sharded: (b, s, in / ranks) -> what `leave` makes of (b, s, out).

    weight: (out, in / ranks). leave: sums over the ranks.
    """

    def __init__(self, weight: Tensor, leave: Operator):
        super().__init__()
        self.weight, self._leave = nn.Parameter(weight), leave

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("return the output of the region: the sum over the ranks")
