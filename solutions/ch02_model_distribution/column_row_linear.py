"""Column-parallel and row-parallel linear layers: the solution, as it stands in minidist.parallel.tensor.linear.

A matrix that is sharded by columns gives each rank some features of the output, complete, so an elementwise
activation function can be applied without communication. A second matrix that is sharded by rows takes exactly these
features; its outputs have the full shape and are terms of a sum. The two layers together cost one all-reduce in
forward, and one in backward where the input entered.

In the opposite order, rows first, a sum is needed before the activation function, because f(a + b) is not f(a) +
f(b), and the input would have to be sharded first.

Usual wrong answers:
* calls the package's classes
* returns one number in every feature
* applies `enter` to the output instead of the input, which mixes gradients of other features
* drops the last feature
* sums the output a second time
* applies `leave` to the input instead of the output
* averages over the ranks
* does not apply `enter`: right values, but the input gets a partial gradient
* does not apply `leave`, so each rank keeps its partial output
* computes in float32, whatever the dtype of the weights
* also all-reduces the inner features, for no purpose
* returns zeros
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
        return F.linear(x if self._enter is None else self._enter(x), self.weight)


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
        return self._leave(F.linear(x, self.weight))
