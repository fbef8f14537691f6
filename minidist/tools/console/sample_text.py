"""Sampling of text from a trained model."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minidist.config import Config
from minidist.fault import checkpoint
from minidist.fault.shards import TensorShard
from minidist.models.transformer import Transformer
from minidist.parameters import Box, named_parameters
from minidist.tools.console.generate import generate
from minidist.train.checkpoint_state import PARAMETERS
from minidist.train.engine import Engine
from minidist.train.resume import stored_config


def load_model(path: Path) -> tuple[Transformer, Config]:
    """Load the full model of the checkpoint in folder `path` on the CPU, and the configuration of its run.

    Raises UserError if the checkpoint is damaged.
    """
    config = stored_config(path, checkpoint.read_index(path).state)
    model = Transformer(config.model)
    pieces = []
    for name, parameter in named_parameters(model).items():
        shape = tuple(parameter.shape)
        pieces.append(TensorShard(f"{PARAMETERS}/{name}", shape, Box.whole(shape), parameter.detach()))
    checkpoint.load_checkpoint(path, pieces, prefix=PARAMETERS + "/")
    return model, config


class Together:
    """Adapter of a sharded model for `generate`; all ranks must call it together."""

    def __init__(self, engine: Engine):
        self.config, self._model, self.next_logits = engine.model.config, engine.model, engine.next_logits

    @property
    def training(self) -> bool:
        return self._model.training

    def train(self, mode: bool = True) -> None:
        self._model.train(mode)

    def eval(self) -> None:
        self._model.eval()

    def parameters(self) -> Iterator[Tensor]:
        return self._model.parameters()


def continue_text(
    model: Transformer | Together,
    prompt: bytes,
    config: Config,
    *,
    tokens: int | None = None,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> tuple[str, str]:
    """Return the prompt (bytes are tokens) and the model's continuation, as text."""
    device = next(model.parameters()).device
    ids = torch.tensor([list(prompt)], dtype=torch.int64, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    ids = generate(
        model,
        ids,
        config.train.sample_tokens if tokens is None else tokens,
        temperature=temperature,
        top_k=top_k,
        generator=generator,
        context=config.data.seq_len,
    )
    data = bytes(min(token, 255) for token in ids[0].tolist())
    return readable(data[: len(prompt)]), readable(data[len(prompt) :])


def sample_text(engine: Engine, config: Config, prompt: np.ndarray) -> tuple[str, str] | None:
    """Return the prompt (bytes) and the model's continuation as text; None if `train.sample_tokens` is 0.

    All ranks call it. If every rank holds the full model, only rank 0 generates and the others return None.
    """
    whole = engine.groups.mesh.dp == engine.groups.world.size and engine.reducer.gatherer is None
    if not config.train.sample_tokens or (whole and engine.groups.world.rank > 0):
        return None
    return continue_text(engine.model if whole else Together(engine), bytes(prompt.tolist()), config)


def readable(data: bytes) -> str:
    """Decode bytes; replace invalid bytes and control characters by U+FFFD."""
    text = data.decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
