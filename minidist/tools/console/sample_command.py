"""The command `minidist sample`."""

from dataclasses import dataclass
from pathlib import Path

from minidist.checkpoint import folders
from minidist.errors import UserError
from minidist.train import run_folder


@dataclass(frozen=True)
class SampleOptions:
    """Generate text from a checkpoint."""

    checkpoint: Path
    """A checkpoint, or a run folder, of which the newest checkpoint is used."""
    prompt: str = "def "
    """The beginning of the text."""
    tokens: int = 400
    """Number of tokens to generate."""
    temperature: float = 0.8
    """Divides the logits; 0 always takes the most likely token."""
    top_k: int | None = None
    """Sample from this many of the most likely tokens only; from all of them when not given."""
    seed: int = 0
    """Random seed; the same seed gives the same text."""


def sample(options: SampleOptions) -> str:
    """Load a model from a checkpoint and return the prompt followed by the text that the model generates.

    Raises UserError for an unusable checkpoint or option.
    """
    for name, value, minimum in (("tokens", options.tokens, 0), ("temperature", options.temperature, 0.0)):
        if value < minimum:
            raise UserError(f"--{name} is {value}; it must be at least {minimum}.")
    if options.top_k is not None and options.top_k < 1:
        raise UserError(f"--top-k is {options.top_k}; it must be at least 1.")
    if not options.prompt:
        raise UserError("--prompt is empty; give at least one character to begin with.")
    path = folders.latest_checkpoint(run_folder.find_checkpoints_folder(options.checkpoint), "sample from")
    from minidist.tools.console.sample_text import (  # here: it imports torch, which takes seconds
        continue_text,
        load_model,
    )

    model, config = load_model(path)
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
