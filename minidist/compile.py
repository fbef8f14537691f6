"""Layers compiled: one graph of each layer's forward and one of its backward, with messages inside of them."""

import torch
from torch import nn

BACKEND = "inductor"  # which writes C++ for CPUs and Triton for GPUs, and needs a compiler on the machine
_GRAPHS = 64  # of one function: torch's limit of 8 is soon reached by ranks that train one model after the other


def compile_layers(model: nn.Module) -> None:
    """Compile the forward of every layer of `model`, and so its backward, with torch.compile.

    model: a Transformer, or what pipeline, tensor and context parallelism left of one. Layers are alike, so the first
    call compiles for all. Each is one graph (`fullgraph`): the collectives are `torch.library` ops, which the
    compiler leaves whole and in their order. Another number of samples is another graph, or one for all sizes.

    Without gradients layers run as they are: evaluation and sampling have other shapes, the latter one for each token.
    """
    torch._dynamo.config.recompile_limit = max(_GRAPHS, torch._dynamo.config.recompile_limit)
    for layer in model.model.layers:
        if hasattr(layer, "self_attn"):  # other stages of a pipeline hold the others
            layer.forward = _in_training(layer.forward)


def _in_training(run):
    compiled = torch.compile(run, fullgraph=True, backend=BACKEND)

    def call(*args):
        return compiled(*args) if torch.is_grad_enabled() else run(*args)

    return call
