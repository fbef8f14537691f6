"""Column-parallel and row-parallel linear layers.

Write the missing lines of ColumnParallelLinear and RowParallelLinear; their docstrings specify the results.
You may call: F.linear, enter, leave.
Check it with: python -m exercises check column_row_linear

Stub e6f15042.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from minidist.parallel.tensor.operators import Operator


class ColumnParallelLinear(nn.Module):
    """A linear layer whose output features are sharded over the ranks: (b, s, in) -> (b, s, out / ranks).

    weight: (out / ranks, in), this rank's shard. enter: the operator applied to the input, the first of
    `region_operators`. None if several layers read the same input and their module applies the operator once for all.
    """

    def __init__(self, weight: Tensor, enter: Operator | None = None):
        super().__init__()
        self.weight, self._enter = nn.Parameter(weight), enter

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's output features, (b, s, out / ranks)."""
        raise NotImplementedError("return this rank's features of the output, (b, s, out / ranks)")


class RowParallelLinear(nn.Module):
    """A linear layer whose input features are sharded over the ranks: (b, s, in / ranks) -> (b, s, out).

    weight: (out, in / ranks), this rank's shard. leave: the operator that sums the ranks' partial outputs, the second
    of `region_operators`; with sequence parallelism it returns (b, s / ranks, out).
    """

    def __init__(self, weight: Tensor, leave: Operator):
        super().__init__()
        self.weight, self._leave = nn.Parameter(weight), leave

    def forward(self, x: Tensor) -> Tensor:
        """Collective: return the sum over the ranks, (b, s, out); with sequence parallelism (b, s / ranks, out)."""
        raise NotImplementedError("return the output of the region: the sum over the ranks")
