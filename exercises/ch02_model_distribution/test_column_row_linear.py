"""Tests of column_row_linear: the reference has the full matrices, on one process, in float64."""

import torch
import torch.nn.functional as F

from exercises.testing import expect, test
from minidist.parallel.tensor.operators import region_operators

BATCH, HIDDEN = 2, 5
TOLERANCE = 1e-12  # sums of less than a hundred terms below 10, in float64 in another order


def draw(salt, *shape):
    """Return a tensor that is equal on all ranks."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(salt), dtype=torch.float64)


class Layer:
    """A gated feed-forward layer: two column-parallel layers on one input that enters once, then row-parallel."""

    def __init__(self, answer, world, network, sequence=False, each=3):
        group, width = network.group, each * world.size
        mine = slice(each * world.rank, each * (world.rank + 1))
        self.length = 2 * world.size
        self.x = draw(1, BATCH, self.length, HIDDEN)
        self.gate, self.up, self.down = draw(2, width, HIDDEN), draw(3, width, HIDDEN), draw(4, HIDDEN, width)
        self.enter, leave = region_operators(group, sequence)
        self.mine, self.tokens = mine, slice(2 * world.rank, 2 * world.rank + 2) if sequence else slice(None)
        self.alone = answer.ColumnParallelLinear(self.gate[mine].clone(), self.enter)
        self.column_gate = answer.ColumnParallelLinear(self.gate[mine].clone())
        self.column_up = answer.ColumnParallelLinear(self.up[mine].clone())
        self.row = answer.RowParallelLinear(self.down[:, mine].clone(), leave)

    def input(self):
        """Return this rank's part of the input."""
        return self.x[:, self.tokens].clone().requires_grad_()

    def __call__(self, x):
        inside = self.enter(x)
        return self.row(F.silu(self.column_gate(inside)) * self.column_up(inside))

    def one_process(self):
        """Return the unsharded weights, input and output."""
        weights = [weight.clone().requires_grad_() for weight in (self.gate, self.up, self.down)]
        x = self.x.clone().requires_grad_()
        gate, up, down = weights
        return weights, x, (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


@test(points=3, ranks=(1, 2, 3))
def column_parallel_values(answer, world, network):
    """The column-parallel layer returns this rank's output features, complete, and no others."""
    layer = Layer(answer, world, network)
    expected = (layer.x @ layer.gate.T)[..., layer.mine]
    expect("this rank's features", layer.alone(layer.input()), expected, tolerance=TOLERANCE)
    _, _, whole = layer.one_process()
    expect(
        "the output of column-parallel, then row-parallel", layer(layer.input()), whole.detach(), tolerance=TOLERANCE
    )


@test(points=3, ranks=(1, 2, 3))
def row_parallel_values(answer, world, network):
    """The row-parallel layer takes this rank's features and returns the full output on every rank."""
    layer = Layer(answer, world, network)
    features = draw(5, BATCH, layer.length, layer.down.shape[1])
    got = layer.row(features[..., layer.mine])
    expect("the output of the row-parallel layer", got, features @ layer.down.T, tolerance=TOLERANCE)


@test(points=3, ranks=(1, 2, 3))
def gradients_are_those_of_one_process(answer, world, network):
    """Input and weights get the gradients of one process, with and without an `enter` operator in the layer."""
    layer = Layer(answer, world, network)
    weights, whole_x, whole = layer.one_process()
    arriving = draw(6, *whole.shape)
    whole.backward(arriving)
    x = layer.input()
    layer(x).backward(arriving)
    mine = layer.mine
    expect("the gradient of the first column-parallel layer", layer.column_gate.weight.grad, weights[0].grad[mine],
           tolerance=TOLERANCE)  # fmt: skip
    expect(
        "the weight gradient of the row-parallel layer",
        layer.row.weight.grad,
        weights[2].grad[:, mine],
        tolerance=TOLERANCE,
    )
    expect("the gradient of the input", x.grad, whole_x.grad, tolerance=10 * TOLERANCE)
    x = layer.input()
    features = layer.alone(x)
    features.backward(torch.ones_like(features))
    ones = torch.ones_like(layer.x[..., :1]).expand(-1, -1, layer.gate.shape[0]) @ layer.gate
    expect("the gradient of the input of a layer with `enter`", x.grad, ones, tolerance=10 * TOLERANCE)


@test(points=3, ranks=(2, 4))
def one_all_reduce_each_way(answer, world, network):
    """Column-parallel, then row-parallel: one all-reduce of (b, s, h) in forward and one in backward."""
    for each in (3, 50):
        layer, before = Layer(answer, world, network, each=each), len(network.records)
        out = layer(layer.input())
        forward = [(record.name, tuple(record.shape)) for record in network.records[before:]]
        out.sum().backward()
        backward = [(record.name, tuple(record.shape)) for record in network.records[before + len(forward) :]]
        wanted = [("all_reduce", (BATCH, layer.length, HIDDEN))]
        expect("operations in forward", forward, wanted)
        expect("operations in backward", backward, wanted)


@test(points=2, ranks=(2, 3))
def sequence_parallel_operators(answer, world, network):
    """The layers with the sequence-parallel operators: outside, each rank has a part of the sequence."""
    layer = Layer(answer, world, network, sequence=True)
    _, whole_x, whole = layer.one_process()
    arriving = draw(6, *whole.shape)
    whole.backward(arriving)
    x = layer.input()
    out = layer(x)
    expect("this rank's part of the output", out, whole.detach()[:, layer.tokens], tolerance=TOLERANCE)
    out.backward(arriving[:, layer.tokens])
    got, expected = x.grad, whole_x.grad[:, layer.tokens]
    expect("the gradient of this rank's part of the input", got, expected, tolerance=10 * TOLERANCE)
