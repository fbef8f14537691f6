"""A whole model in, this stage's parts of it out. Names stay those of the whole model.

The model knows nothing of this, and nothing is imported from it: it is known by the names of its modules, those of
Llama. What comes after the last layer, and whatever else a model has, belongs to the last part.
"""

from collections.abc import Sequence

from torch import nn

from minidist.parallel.pipeline.actions import Schedule
from minidist.parameters import named_parameters

EMBEDDING = "model.embed_tokens.weight"


class ModuleOnOtherStage(nn.Module):
    """In the place of a module that another stage holds, so that the names of the others stay as they are."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self.register_parameter("weight", None)  # what ties an embedding and a head finds that it is not here

    def forward(self, *_, **__):
        raise RuntimeError(f"{self.name} was called, and another stage of the pipeline holds it")


def keep_stage_modules(
    model: nn.Module, schedule: Schedule, stage: int, parts: Sequence[range]
) -> dict[str, tuple[int, ...]]:
    """Leave in `model` what this stage holds of it; returns the chunks that use each parameter, by global name.

    model: a whole Transformer. parts: the layers of every part of the model, from the input on. A head that is tied to
    an embedding of another stage keeps a copy, under the embedding's name: the gradient is the sum of what both get.
    """
    tied, end = model.config.tie_embeddings, schedule.positions - 1
    chunks = {schedule.position(stage, chunk): chunk for chunk in range(schedule.chunks)}
    part_of = {index: position for position in chunks for index in parts[position]}
    layers = model.model.layers
    for index in range(len(layers)):
        if index not in part_of:
            layers[index] = ModuleOnOtherStage(f"layer {index}")
    if 0 not in chunks and not (end in chunks and tied):
        model.model.embed_tokens = ModuleOnOtherStage("the embedding")
    if end not in chunks:
        _leave_out(model, keep=("model",))
        _leave_out(model.model, keep=("embed_tokens", "layers"))
    model.tie()
    used_by = {}
    for name in named_parameters(model):
        if name.startswith("model.layers."):
            at = [part_of[int(name.split(".")[2])]]
        else:
            at = [0] * (name == EMBEDDING) + [end] * (tied or name != EMBEDDING)
        used_by[name] = tuple(chunks[position] for position in at if position in chunks)
    return used_by


def _leave_out(module: nn.Module, keep: Sequence[str]) -> None:
    """All that the module has itself, but for the children to keep."""
    for name in list(dict(module.named_parameters(recurse=False))) + list(dict(module.named_buffers(recurse=False))):
        setattr(module, name, None)
    for name in dict(module.named_children()):
        if name not in keep:
            setattr(module, name, ModuleOnOtherStage(name))
