"""Linear layers sharded over ranks: column parallel (output features) and row parallel (input features).

Shoeybi et al. 2019, section 3: in `Y = X A` with A sharded by columns, each rank computes some features of Y without
communication. A second matrix, sharded by rows, takes exactly these features, and the sum over ranks is its output. So
a feed-forward layer or an attention needs one all-reduce in forward and one in backward. torch stores A transposed,
(out, in).
"""

import torch.nn.functional as F
from torch import Tensor, nn

from minidist.parallel.tensor.operators import Operator


class ColumnParallelLinear(nn.Module):
    """A linear layer whose output features are sharded over the ranks: (b, s, in) -> (b, s, out / ranks).

    weight: (out / ranks, in), this rank's shard. enter: the operator applied to the input, the first of
    `region_operators`. None if the surrounding module applies it once for all layers that read the same input.
    """

    def __init__(self, weight: Tensor, enter: Operator | None = None):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self._enter = enter

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's output features, (b, s, out / ranks)."""
        return F.linear(x if self._enter is None else self._enter(x), self.weight)


class RowParallelLinear(nn.Module):
    """A linear layer whose input features are sharded over the ranks: (b, s, in / ranks) -> (b, s, out).

    weight: (out, in / ranks), this rank's shard. leave: the operator that sums the ranks' partial outputs, the second
    of `region_operators`; with sequence parallelism it returns (b, s / ranks, out).
    """

    def __init__(self, weight: Tensor, leave: Operator):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self._leave = leave

    def forward(self, x: Tensor) -> Tensor:
        """Collective: return the sum over the ranks, (b, s, out); with sequence parallelism (b, s / ranks, out)."""
        return self._leave(F.linear(x, self.weight))
