"""Resume a run: read the checkpoint's configuration, and check that a run can continue from it."""

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
    """Return the configuration of the run to resume, as the base for new options.

    resume: a run folder, its folder of checkpoints, or a checkpoint. Raises UserError if there is no intact checkpoint.
    """
    path = folders.latest_checkpoint(checkpoints_of(resume))
    from minidist.fault import checkpoint  # imports torch, so only after the check above

    stored = stored_config(path, checkpoint.read_index(path).state)
    return dataclasses.replace(
        stored, folder=None, checkpoint=dataclasses.replace(stored.checkpoint, resume=Path(resume))
    )


def check_before(config: Config, corpus: "Corpus") -> None:
    """Raise UserError if `config` cannot continue from its checkpoint. Runs before any rank starts."""
    if config.checkpoint.resume is None:
        return
    path = folders.latest_checkpoint(checkpoints_of(config.checkpoint.resume))
    from minidist.fault import checkpoint

    check_resumable(path, checkpoint.read_index(path).state, config, corpus)


def stored_config(path: Path, state: dict[str, Any]) -> Config:
    """Return the configuration in a checkpoint's state. Raises UserError if this trainer did not write it."""
    try:
        return from_text(state["config"], str(path))
    except KeyError:
        raise UserError(f"{path} is a checkpoint, but not of a run of this trainer: its state has no config.") from None


def check_resumable(path: Path, state: dict[str, Any], config: Config, corpus: "Corpus") -> None:
    """Raise UserError unless a run of `config` on `corpus` can continue from the checkpoint in `path`."""
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
    """Return a warning if resuming after `step` steps changes the learning rate of the next step, else None.

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
