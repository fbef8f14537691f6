"""A small model that reports each use of a weight: for tests of answers that gather and free parameters."""

import torch
from torch import nn

from minidist.zero.plan import ROOT

LAYERS = 3


class ReportedLinear(torch.autograd.Function):
    """Compute x @ weight + bias. report_use: called with "forward" and "backward" before the weight is read."""

    @staticmethod
    def forward(ctx, x, weight, bias, report_use):
        report_use("forward")
        ctx.save_for_backward(x, weight)
        ctx.report_use = report_use
        return x @ weight + bias

    @staticmethod
    def backward(ctx, grad):
        ctx.report_use("backward")
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.T @ grad, grad.sum(0), None


class Layer(nn.Module):
    def __init__(self, index, weight, bias):
        super().__init__()
        self.index, self.weight, self.bias, self.report_use = index, nn.Parameter(weight), nn.Parameter(bias), None

    def forward(self, x):
        return torch.relu(
            ReportedLinear.apply(x, self.weight, self.bias, lambda kind: self.report_use(kind, self.index))
        )


class WeightUseModel(nn.Module):
    """Three layers between an embedding and a head; `layers` is the range of them that a forward runs."""

    def __init__(self, values):
        super().__init__()
        self.embed, self.head = nn.Parameter(values["embed"]), nn.Parameter(values["head"])
        self.layers = nn.ModuleList(
            Layer(i, values[f"layers.{i}.weight"], values[f"layers.{i}.bias"]) for i in range(LAYERS)
        )
        self.on_weight_use(lambda kind, index: None)

    def on_weight_use(self, report_use):
        """Call `report_use(kind, index)` before a block's "forward" and "backward"."""
        self.report_use = report_use
        for layer in self.layers:
            layer.report_use = report_use

    def forward(self, x, layers=None):
        layers = range(LAYERS) if layers is None else layers
        zero = torch.zeros(1, dtype=x.dtype)
        if layers.start == 0:
            x = ReportedLinear.apply(x, self.embed, zero, lambda kind: self.report_use(kind, ROOT))
        for index in layers:
            x = self.layers[index](x)
        if layers.stop < LAYERS:
            return x
        return (ReportedLinear.apply(x, self.head, zero, lambda kind: self.report_use(kind, ROOT)).sum(),)
