"""Column-parallel and row-parallel linear layers: the solution, as it stands in minidist.parallel.tensor.linear.

A matrix that is sharded by columns gives each rank some features of the output, complete, so an elementwise
activation function can be applied without communication. A second matrix that is sharded by rows takes exactly these
features; its outputs have the full shape and are terms of a sum. The two layers together cost one all-reduce in
forward, and one in backward where the input entered.

In the opposite order, rows first, a sum is needed before the activation function, because f(a + b) is not f(a) +
f(b), and the input would have to be sharded first.

Usual wrong answers:
* the package's own
* one number in every feature
* the output enters in the place of the input, and gradients of other features are mixed into it
* the last feature is left out
* what has been summed is summed again
* the parts of the input leave, not those of the output
* the mean over the ranks
* the values are right, and each rank's input gets the gradient of its own features only
* each rank keeps its own term of the sum
* in float32, whatever the weights are
* the features inside are summed too, which nobody looks at
* zeros
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
