"""The configuration in a checkpoint, and whether a run can continue from it."""

import tomllib
from typing import TYPE_CHECKING, Any

from minidist.config import Config, to_toml
from minidist.errors import DamagedError, UserError
from minidist.precision.scaler import LossScaler
from minidist.train.run_folder import AUTO

if TYPE_CHECKING:
    from minidist.data.corpus import Corpus
    from minidist.fault.index import Index


def read_stored_config(index: "Index") -> dict[str, Any]:
    """Return the configuration of the run that wrote the checkpoint with this index, as TOML values.

    Raises UserError if the checkpoint has no configuration (another program's); DamagedError if it is invalid.
    """
    if "config" not in index.state:
        raise UserError(f"{index.path} is a checkpoint, but not of a run of this trainer: its state has no config.")
    try:
        return tomllib.loads(index.state["config"])
    except (AttributeError, TypeError, tomllib.TOMLDecodeError):  # the first two if it is not text
        raise DamagedError(f"{index.path} is damaged: the configuration in its state is not TOML text.") from None


def check_resumable(index: "Index", config: Config, corpus: "Corpus") -> None:
    """Raise UserError unless a run of `config` on `corpus` can continue from the checkpoint with this index.

    Raises DamagedError if the state in the index is not one that the trainer writes. A checkpoint of the last step,
    after which nothing is left to train, is an error only if `config.checkpoint.resume` names a checkpoint.
    """
    path, state = index.path, index.state
    before, now = read_stored_config(index), tomllib.loads(to_toml(config))
    _check_state(index)
    if state["corpus"] != corpus.fingerprint:
        raise UserError(
            f"{path} was trained on another corpus ({state['corpus_name']}) than this run has ({corpus.describe()}). "
            "Give the same --data.source or --data.path, or start a new run."
        )
    consistency = before.setdefault("consistency", now["consistency"])
    before["consistency"] = {"fragments": 1, "exchange": "full"} | consistency  # checkpoints without a choice
    names = ("train", "seed"), ("data", "seq_len"), ("data", "min_length"), ("optim", "kind"), ("consistency", "mode")
    names += ("consistency", "fragments"), ("consistency", "exchange")
    for section, field in names:
        name, was = f"{section}.{field.replace('_', '-')}", before.get(section, {}).get(field)
        if was != now[section][field]:
            raise UserError(
                f"{path} was trained with --{name} {was}, this run has {now[section][field]}: it would not go on where "
                f"that run ended. Give --{name} {was}, or start a new run."
            )
    if state["step"] >= config.train.steps and config.checkpoint.resume not in (None, AUTO):
        raise UserError(
            f"{path} is at step {state['step']}, and the run ends at step {config.train.steps}: nothing is left to "
            f"do. Give --train.steps more than {state['step']}."
        )


def _check_state(index: "Index") -> None:
    """Raise DamagedError unless the state of a checkpoint has the fields that the trainer reads, with valid values."""
    from minidist.fault.index_validation import is_count  # here: it imports torch, which takes seconds

    state, scaler = index.state, index.state.get("loss_scaler")
    fields = {
        "step": is_count(state.get("step")) and state["step"] == index.step,
        "position": is_count(state.get("position")),
        "corpus": isinstance(state.get("corpus"), str),
        "corpus_name": isinstance(state.get("corpus_name"), str),
        "loss_scaler": scaler is None or LossScaler.is_valid_state(scaler),
    }
    if wrong := [name for name, valid in fields.items() if not valid]:
        value = repr(state.get(wrong[0], "missing"))
        raise DamagedError(f"{index.path} is damaged: in the state of step {index.step}, {wrong[0]} is {value[:60]}.")
