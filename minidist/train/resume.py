"""The configuration in a checkpoint, and whether a run can continue from it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidist.config import Config
from minidist.config_file import from_text
from minidist.errors import UserError
from minidist.train.run_folder import AUTO

if TYPE_CHECKING:
    from minidist.data.corpus import Corpus


def parse_checkpoint_config(path: Path, state: dict[str, Any]) -> Config:
    """Return the configuration of the run that wrote a checkpoint.

    path: the checkpoint's folder, for messages. state: the `state` of its index. Raises UserError if `state` has no
    configuration: another program wrote the checkpoint.
    """
    try:
        return from_text(state["config"], str(path))
    except KeyError:
        raise UserError(f"{path} is a checkpoint, but not of a run of this trainer: its state has no config.") from None


def check_resumable(path: Path, state: dict[str, Any], config: Config, corpus: "Corpus") -> None:
    """Raise UserError unless a run of `config` on `corpus` can continue from the checkpoint in `path`.

    state: the `state` of the checkpoint's index. If the checkpoint is of the last step, there is nothing left to train:
    this is an error only if `config.checkpoint.resume` names a checkpoint.
    """
    before = parse_checkpoint_config(path, state)
    if state["corpus"] != corpus.fingerprint:
        raise UserError(
            f"{path} was trained on another corpus ({state['corpus_name']}) than this run has ({corpus.describe()}). "
            "Give the same --data.source or --data.path, or start a new run."
        )
    for name, was, now in (
        ("train.seed", before.train.seed, config.train.seed),
        ("data.seq-len", before.data.seq_len, config.data.seq_len),
        ("data.min-length", before.data.min_length, config.data.min_length),
        ("optim.kind", before.optim.kind, config.optim.kind),
    ):
        if was != now:
            raise UserError(
                f"{path} was trained with --{name} {was}, this run has {now}: it would not go on where that run ended. "
                f"Give --{name} {was}, or start a new run."
            )
    if state["step"] >= config.train.steps and config.checkpoint.resume not in (None, AUTO):
        raise UserError(
            f"{path} is at step {state['step']}, and the run ends at step {config.train.steps}: nothing is left to "
            f"do. Give --train.steps more than {state['step']}."
        )
