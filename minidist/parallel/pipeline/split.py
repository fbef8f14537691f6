"""Reduce a full model to the modules of one pipeline stage; parameters keep their names.

Modules are found by their names, which are Llama's; the model's code is not imported. Modules other than the embedding
and the layers belong to the last part.
"""

from collections.abc import Sequence

from torch import nn

from minidist.parallel.pipeline.actions import Schedule
from minidist.parameters import named_parameters

EMBEDDING = "model.embed_tokens.weight"


class ModuleOnOtherStage(nn.Module):
    """Placeholder for a module that another stage holds, so that this stage's modules keep their names."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self.register_parameter("weight", None)  # weight tying finds None

    def forward(self, *_, **__):
        """Raise RuntimeError: this stage does not have the module."""
        raise RuntimeError(f"{self.name} was called, and another stage of the pipeline holds it")


def keep_stage_modules(
    model: nn.Module, schedule: Schedule, stage: int, parts: Sequence[range]
) -> dict[str, tuple[int, ...]]:
    """Remove the modules of other stages from `model`; return the chunks that use each remaining parameter.

    model: a full Transformer. parts: the layers of each part of the model, from the input on. Returns, by the
    parameter's name in the full model, the indices of this stage's chunks that use it. If the head's weight is tied to
    an embedding on another stage, this stage keeps a replica of the embedding's weight, under the embedding's name; the
    caller must sum the gradients of both replicas.
    """
    tied = model.config.tie_embeddings
    end = schedule.num_parts - 1
    chunks = {schedule.position(stage, chunk): chunk for chunk in range(schedule.num_chunks)}
    part_of = {index: position for position in chunks for index in parts[position]}
    layers = model.model.layers
    for index in range(len(layers)):
        if index not in part_of:
            layers[index] = ModuleOnOtherStage(f"layer {index}")
    if 0 not in chunks and not (end in chunks and tied):
        model.model.embed_tokens = ModuleOnOtherStage("the embedding")
    if end not in chunks:
        _remove_modules(model, keep=("model",))
        _remove_modules(model.model, keep=("embed_tokens", "layers"))
    model.tie_weights()
    used_by = {}
    for name in named_parameters(model):
        if name.startswith("model.layers."):
            at = [part_of[int(name.split(".")[2])]]
        else:
            at = [0] * (name == EMBEDDING) + [end] * (tied or name != EMBEDDING)
        used_by[name] = tuple(chunks[position] for position in at if position in chunks)
    return used_by


def _remove_modules(module: nn.Module, keep: Sequence[str]) -> None:
    """Remove the module's own parameters, buffers and children, except the children in `keep`."""
    for name in list(dict(module.named_parameters(recurse=False))) + list(dict(module.named_buffers(recurse=False))):
        setattr(module, name, None)
    for name in dict(module.named_children()):
        if name not in keep:
            setattr(module, name, ModuleOnOtherStage(name))
