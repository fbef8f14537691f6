"""Sampling of text from a trained model."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minidist.checkpoint.load import load_checkpoint, read_index
from minidist.checkpoint.shards import TensorShard
from minidist.config import Config
from minidist.models.transformer import Transformer
from minidist.parameters import Box, named_parameters
from minidist.simple.engine import Engine as SimpleEngine
from minidist.tools.console.generate import generate
from minidist.tools.console.next_token_logits import next_token_logits, next_token_logits_of_simple_engine
from minidist.train.checkpoint_state import PARAMETERS
from minidist.train.engine import Engine
from minidist.train.resume import parse_checkpoint_config


def load_model(path: Path) -> tuple[Transformer, Config]:
    """Load the unsharded model of a checkpoint on the CPU, in float32; return it and the configuration of its run.

    path: the folder of the checkpoint, of any precision. Raises UserError if the checkpoint is damaged.
    """
    config = parse_checkpoint_config(read_index(path))
    model = Transformer(config.model)
    pieces = []
    for name, parameter in named_parameters(model).items():
        shape = tuple(parameter.shape)
        pieces.append(TensorShard(f"{PARAMETERS}/{name}", shape, Box.whole(shape), parameter.detach()))
    load_checkpoint(path, pieces, cast=True, prefix=PARAMETERS + "/")
    return model, config


class _ShardedModel:
    """The sharded model of an engine, in the form that `generate` needs. All ranks must call `generate` together."""

    def __init__(self, engine: Engine | SimpleEngine):
        self.config, self._model = engine.model.config, engine.model
        is_simple = isinstance(engine, SimpleEngine)
        self.next_token_logits = partial(next_token_logits_of_simple_engine if is_simple else next_token_logits, engine)

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self._model.training

    def train(self, mode: bool = True) -> None:
        """Set training mode, or evaluation mode if `mode` is False."""
        self._model.train(mode)

    def eval(self) -> None:
        """Set evaluation mode."""
        self._model.eval()

    def parameters(self) -> Iterator[Tensor]:
        """This rank's parameters."""
        return self._model.parameters()


def continue_text(
    model: Transformer | _ShardedModel,
    prompt: bytes,
    config: Config,
    *,
    tokens: int | None = None,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> tuple[str, str]:
    """Let a model continue a prompt; return the prompt and the continuation, as text. Each byte of `prompt` is a token.

    config: the configuration of the run. tokens: the number of tokens to generate; None for
    `config.train.sample_tokens`. temperature: divides the logits; 0 always takes the most likely token. top_k: sample
    from the k most likely tokens only. seed: the seed of the random numbers. Collective if the model is sharded.
    """
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
        context_len=config.data.seq_len,
    )
    data = bytes(min(token, 255) for token in ids[0].tolist())
    return decode_printable(data[: len(prompt)]), decode_printable(data[len(prompt) :])


def sample_text(engine: Engine | SimpleEngine, config: Config, prompt: np.ndarray) -> tuple[str, str] | None:
    """Collective: let the engine's model continue a prompt; return the prompt and the continuation as text.

    prompt: bytes, as token ids. Returns None if `train.sample_tokens` is 0. If every rank has the full model, only rank
    0 generates and the other ranks return None.
    """
    replicated = engine.groups.mesh.dp == engine.groups.world.size and config.zero.stage < 3
    if not config.train.sample_tokens or (replicated and engine.groups.world.rank > 0):
        return None
    return continue_text(engine.model if replicated else _ShardedModel(engine), bytes(prompt.tolist()), config)


def decode_printable(data: bytes) -> str:
    """Decode UTF-8 for a terminal: replace invalid bytes and control characters by U+FFFD."""
    text = data.decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
