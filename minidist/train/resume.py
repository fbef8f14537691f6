"""Resuming: the options of the run that saved a checkpoint, and whether another run can continue from it.

Whatever is wrong with the files of a checkpoint is a DamagedError, for which an automatic resume takes the checkpoint
before (`load_first_intact`). Options under which a run cannot continue are a UserError, which ends it.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidist.checkpoint import folders
from minidist.config import Config
from minidist.config_text import parse_config_text
from minidist.errors import DamagedError, UserError
from minidist.precision.scaler import LossScaler
from minidist.train.run_folder import AUTO, find_checkpoints_folder

if TYPE_CHECKING:
    from minidist.checkpoint.index import Index
    from minidist.data.corpus import Corpus

# Sections with options that change what a run computes, and their options that do not.
_COMPUTING_SECTIONS = ("model", "data", "optim", "precision", "consistency", "train")
_FREE_OPTIONS = {
    *("model.max-seq-len", "consistency.server", "train.log-every", "train.max-skipped-steps"),
    *("train.straggler-threshold", "train.eval-every", "train.eval-samples", "train.sample-tokens"),
    "train.micro-batches",
}
# A run with other values of these computes another function, or has other states, than those in the checkpoint.
_FIXED_OPTIONS = {
    *("model.vocab-size", "model.hidden-size", "model.intermediate-size", "model.num-layers", "model.num-heads"),
    *("model.num-kv-heads", "model.rope-theta", "model.norm-eps", "model.tie-embeddings"),
    *("data.seq-len", "data.min-length", "optim.kind", "consistency.mode", "consistency.fragments"),
    *("consistency.exchange", "train.seed"),
}
_REPLICA = re.compile(r"replica-(\d+)\.")


@dataclass(frozen=True)
class ChangedOption:
    """An option whose value differs between two runs. name: as "optim.lr". before, now: its values as text."""

    name: str
    before: str
    now: str


def find_changed_options(before: Config, now: Config) -> list[ChangedOption]:
    """Return the options that change what a run computes and differ between two runs, in the order of `Config`."""
    changed = []
    for section in _COMPUTING_SECTIONS:
        for field in dataclasses.fields(getattr(now, section)):
            name = f"{section}.{field.name.replace('_', '-')}"
            values = [getattr(getattr(config, section), field.name) for config in (before, now)]
            if values[0] != values[1] and name not in _FREE_OPTIONS:
                changed.append(ChangedOption(name, *map(_format_value, values)))
    return changed


def read_resumed_config(resume: Path) -> Config:
    """Return the configuration saved in a checkpoint, with `checkpoint.resume` set to `resume` and no folder.

    resume: a checkpoint, or a run folder or a folder of checkpoints, of which the latest checkpoint is used. Raises
    UserError if there is no intact checkpoint.
    """
    path = folders.latest_checkpoint(find_checkpoints_folder(resume))
    from minidist.checkpoint.load import read_index  # here: it imports torch, and a wrong path is reported before

    stored = parse_checkpoint_config(read_index(path))
    how = dataclasses.replace(stored.checkpoint, resume=Path(resume), inherit=False)
    return dataclasses.replace(stored, folder=None, checkpoint=how)


def inherit_options(config: Config) -> Config:
    """Return `config` with the options of the run that it resumes, where its own have their default values.

    Returns `config` unchanged if it names no checkpoint to resume, or if `checkpoint.inherit` is False. Raises
    UserError if there is no intact checkpoint.
    """
    if config.checkpoint.resume in (None, AUTO) or not config.checkpoint.inherit:
        return config
    return _overlay_changed_options(read_resumed_config(config.checkpoint.resume), config, Config())


def parse_checkpoint_config(index: "Index") -> Config:
    """Return the configuration of the run that wrote a checkpoint, from the checkpoint's index.

    Raises DamagedError if it is missing or not valid.
    """
    text = index.state.get("config")
    if not isinstance(text, str):
        value = repr(text)[:60] if "config" in index.state else "missing"
        raise DamagedError(
            f"{index.path} is damaged, or not a checkpoint of this trainer: the configuration in its state is {value}."
        )
    try:
        return parse_config_text(text, "the configuration in its state")
    except UserError as error:
        raise DamagedError(f"{index.path} is damaged: {error}") from None


def load_first_intact(checkpoints: Sequence[Path], load: Callable[[Path], Any]) -> tuple[Path | None, list[str]]:
    """Call `load` with one checkpoint after another until it raises no DamagedError; return that checkpoint.

    Also returns a line for each damaged one. (None, []) without checkpoints; raises the last DamagedError if all of
    them are damaged.
    """
    damaged: list[str] = []
    for path in checkpoints:
        try:
            load(path)
            return path, damaged
        except DamagedError as error:
            if path == checkpoints[-1]:
                raise
            damaged.append(str(error))
    return None, damaged


def check_resumable(index: "Index", config: Config, corpus: "Corpus") -> list[ChangedOption]:
    """Raise UserError unless a run of `config` on `corpus` can continue from the checkpoint with this index.

    Returns the options whose values differ from those in the checkpoint, except data.source and data.path. Raises
    DamagedError if the state in the index is not one that the trainer writes. A checkpoint of the last step, after
    which nothing is left to train, is an error only if `config.checkpoint.resume` names a checkpoint.
    """
    path = index.path
    state = index.state
    before = parse_checkpoint_config(index)
    _check_state(index)
    if state["corpus"] != corpus.fingerprint:
        raise UserError(
            f"{path} was trained on another corpus ({state['corpus_name']}) than this run has ({corpus.describe()}). "
            "Give the same --data.source or --data.path, or start a new run."
        )
    changed = find_changed_options(before, config)
    if fixed := [option for option in changed if option.name in _FIXED_OPTIONS]:
        was = " ".join(f"--{option.name} {option.before}" for option in fixed)
        now = ", ".join(option.now for option in fixed)
        raise UserError(
            f"{path} was trained with {was}, this run has {now}: it would not go on where that run ended. Give {was}, "
            "or start a new run."
        )
    if state["step"] >= config.train.steps and config.checkpoint.resume not in (None, AUTO):
        raise UserError(
            f"{path} is at step {state['step']}, and the run ends at step {config.train.steps}: nothing is left to "
            f"do. Give --train.steps more than {state['step']}."
        )
    return [option for option in changed if option.name not in ("data.source", "data.path")]


def _check_state(index: "Index") -> None:
    """Raise DamagedError unless the state of a checkpoint has the fields that the trainer reads, with valid values."""
    from minidist.checkpoint.index_validation import is_count  # here: it imports torch, which takes seconds

    state = index.state
    scaler = index.state.get("loss_scaler")
    replicas = {int(match[1]) for match in map(_REPLICA.match, index.tensors) if match} | {0}
    fields = {
        "step": is_count(state.get("step")) and state["step"] == index.step,
        "position": is_count(state.get("position")),
        "corpus": isinstance(state.get("corpus"), str),
        "corpus_name": isinstance(state.get("corpus_name"), str),
        "replicas": replicas == {*range(len(replicas))} and state.get("replicas", 1) == len(replicas),
        "loss_scaler": scaler is None or LossScaler.is_valid_state(scaler),
    }
    if wrong := [name for name, valid in fields.items() if not valid]:
        value = repr(state.get(wrong[0], "missing"))
        raise DamagedError(f"{index.path} is damaged: in the state of step {index.step}, {wrong[0]} is {value[:60]}.")


def _overlay_changed_options(base: Any, config: Any, default: Any) -> Any:
    """Return `base` with those values of `config` that differ from `default`, in all sections."""
    changes = {}
    for field in dataclasses.fields(config):
        below, value, usual = (getattr(each, field.name) for each in (base, config, default))
        if dataclasses.is_dataclass(value):
            changes[field.name] = _overlay_changed_options(below, value, usual)
        elif value != usual:
            changes[field.name] = value
    return dataclasses.replace(base, **changes)


def _format_value(value: Any) -> str:
    """Return the value of an option as one writes it on the command line."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool | None) else str(value)
