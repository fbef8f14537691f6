"""Going on with a run: which configuration, and whether this checkpoint can be the beginning of this run."""

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidist.config import Config
from minidist.config_file import from_text
from minidist.errors import UserError
from minidist.fault import folders
from minidist.train.run_folder import checkpoints_of
from minidist.train.schedule import learning_rate

if TYPE_CHECKING:
    from minidist.data.corpus import Corpus


def resumed_config(resume: Path) -> Config:
    """The configuration of the run whose checkpoint, or folder, `resume` is, to lay new options over.

    Raises UserError when there is no checkpoint or it is damaged.
    """
    path = folders.latest_checkpoint(checkpoints_of(resume))
    from minidist.fault import checkpoint  # here, since torch comes with it: a missing folder is told at once

    stored = stored_config(path, checkpoint.read_index(path).state)
    return dataclasses.replace(
        stored, folder=None, checkpoint=dataclasses.replace(stored.checkpoint, resume=Path(resume))
    )


def check_before(config: Config, corpus: "Corpus") -> None:
    """Raise UserError when `config` resumes from a checkpoint that it cannot go on from. No rank is needed."""
    if config.checkpoint.resume is None:
        return
    path = folders.latest_checkpoint(checkpoints_of(config.checkpoint.resume))
    from minidist.fault import checkpoint

    check_resumable(path, checkpoint.read_index(path).state, config, corpus)


def stored_config(path: Path, state: dict[str, Any]) -> Config:
    """The configuration in a checkpoint's state. Raises UserError when it was not written by this trainer."""
    try:
        return from_text(state["config"], str(path))
    except KeyError:
        raise UserError(f"{path} is a checkpoint, but not of a run of this trainer: its state has no config.") from None


def check_resumable(path: Path, state: dict[str, Any], config: Config, corpus: "Corpus") -> None:
    """Raise UserError unless the run of `config` on `corpus` can go on from the checkpoint in `path`."""
    before = stored_config(path, state)
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
    if state["step"] >= config.train.steps:
        raise UserError(
            f"{path} is at step {state['step']}, and the run ends at step {config.train.steps}: nothing is left to "
            f"do. Give --train.steps more than {state['step']}."
        )


def describe_learning_rate_jump(before: Config, config: Config, step: int) -> str | None:
    """One line if resuming after `step` steps changes the learning rate of the next step; None if it does not.

    before: the configuration of the run that wrote the checkpoint.
    """
    was, now = (learning_rate(run.optim, step, run.train.steps) for run in (before, config))
    if math.isclose(was, now, rel_tol=0.01):
        return None
    schedules = [f"{run.optim.schedule} over {run.train.steps} steps" for run in (before, config)]
    return (
        f"learning rate of step {step + 1}: {now:.2e} by the schedule of this run ({schedules[1]}); by that of the "
        f"checkpoint ({schedules[0]}) it would be {was:.2e}. To extend runs without such a jump, train them with "
        "--optim.schedule constant or wsd."
    )
