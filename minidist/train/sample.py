"""Text from a checkpoint, or from the model at the end of a run."""

from dataclasses import dataclass
from pathlib import Path

import torch

from minidist.config import Config
from minidist.configfile import from_text
from minidist.errors import UserError
from minidist.fault import checkpoint, folders
from minidist.fault.layout import Piece
from minidist.models.generate import generate
from minidist.models.transformer import Transformer
from minidist.spec import Box, named_parameters
from minidist.train import runfolder
from minidist.train.state import PARAMETERS


@dataclass(frozen=True)
class SampleOptions:
    """Text from a checkpoint."""

    checkpoint: Path
    """A checkpoint, or a run folder whose newest one to use."""
    prompt: str = "def "
    """What the text begins with."""
    tokens: int = 400
    """Tokens to add."""
    temperature: float = 0.8
    """Divides the logits; 0 always takes the likeliest token."""
    top_k: int | None = None
    """Choose among this many likeliest tokens only."""
    seed: int = 0
    """Of the choices; the same seed gives the same text."""


def load_model(path: Path) -> tuple[Transformer, Config]:
    """The model of a checkpoint on the CPU, whole, and the configuration it was trained with."""
    found = folders.latest(runfolder.checkpoints_of(path))
    config = from_text(checkpoint.read_index(found).state["config"], str(found))
    model = Transformer(config.model)
    pieces = []
    for name, parameter in named_parameters(model).items():
        shape = tuple(parameter.shape)
        pieces.append(Piece(PARAMETERS + name, shape, Box.whole(shape), parameter.detach()))
    checkpoint.load(found, pieces, prefix=PARAMETERS)
    return model, config


def sample(options: SampleOptions) -> str:
    """The prompt and its continuation. Raises UserError for a checkpoint or an option that cannot be used."""
    for name, value, least in (("tokens", options.tokens, 0), ("temperature", options.temperature, 0.0)):
        if value < least:
            raise UserError(f"--{name} is {value}; it must be at least {least}.")
    if options.top_k is not None and options.top_k < 1:
        raise UserError(f"--top-k is {options.top_k}; it must be at least 1.")
    if not options.prompt:
        raise UserError("--prompt is empty; give at least one character to begin with.")
    model, config = load_model(options.checkpoint)
    return "".join(
        continue_text(
            model,
            options.prompt.encode(),
            config,
            tokens=options.tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            seed=options.seed,
        )
    )


def continue_text(
    model: Transformer,
    prompt: bytes,
    config: Config,
    *,
    tokens: int | None = None,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> tuple[str, str]:
    """The prompt (bytes are tokens) and what the model makes of it, as text."""
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
    return tuple(part.decode(errors="replace") for part in (data[: len(prompt)], data[len(prompt) :]))
