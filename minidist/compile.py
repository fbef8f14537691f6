"""Compile layers: one graph for a layer's forward and one for its backward, which contain the collectives."""

import torch
from torch import nn

BACKEND = "inductor"  # generates C++ for CPUs and Triton for GPUs, and needs a compiler on the machine
_MAX_GRAPHS = 64  # per function: ranks that train one model after another soon reach torch's limit of 8


def compile_layers(model: nn.Module) -> None:
    """Replace the forward of every layer of `model` by a version that torch.compile compiles, backward included.

    model: a Transformer, possibly already split by pipeline, tensor and context parallelism. All layers have the same
    code, so the first call compiles for all of them. A layer is one graph (`fullgraph`): the collectives are
    `torch.library` ops, which the compiler neither splits nor reorders. When the number of samples changes, torch
    compiles once more: for the new number, or for any number.

    Without gradients the layers run uncompiled: evaluation and sampling have other shapes than training, and sampling
    has a new shape for every token.
    """
    torch._dynamo.config.recompile_limit = max(_MAX_GRAPHS, torch._dynamo.config.recompile_limit)
    for layer in model.model.layers:
        if hasattr(layer, "self_attn"):  # not a placeholder of another stage's layer
            layer.forward = _compile_for_training(layer.forward)


def _compile_for_training(run):
    """Return a function that calls `run` compiled if gradients are enabled, and uncompiled otherwise."""
    compiled = torch.compile(run, fullgraph=True, backend=BACKEND)

    def call(*args):
        return compiled(*args) if torch.is_grad_enabled() else run(*args)

    return call
