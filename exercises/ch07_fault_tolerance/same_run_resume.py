"""The resumed run is the same run.

A resumed run must take the same steps as a run that was never interrupted, bit by bit. Collect everything that decides
the next step, as shards of tensors and as a JSON object, and continue from the newest checkpoint that is intact.

trainer: has an engine, and what `json_state` needs: progress (`Progress`), mesh, config, config_text and corpus.
paths: folders of checkpoints, newest first. An engine has:
    reducer.masters: {name: tensor}, what the optimizer updates on this rank: its shard of each trained parameter
    optimizer.state[master]: {key: tensor} of one master, empty before the first step
    model: with all parameters, of which some may be frozen (requires_grad is False), and all buffers
    parallel.master_specs, parallel.specs: {name: ParamSpec}, of the masters, and of all parameters and buffers
    scaler: None without loss scaling; has state_dict() and load_state_dict(state)
    groups.world.rank: this rank's number; merger: None, unless replicas train separately (chapter 04)

Example: one rank, a parameter "w" of shape (3,) and AdamW. After 5 steps of 4 samples state_shards has params/w,
optimizer.step/w, optimizer.exp_avg/w and optimizer.exp_avg_sq/w, and json_state is
    {"config": trainer.config_text, "step": 5, "position": 20, "corpus": trainer.corpus.fingerprint,
     "corpus_name": trainer.corpus.describe(), "replicas": trainer.config.num_replicas(trainer.mesh),
     "loss_scaler": None, or its state_dict()}

Checked: names, boxes, memory and is_saved_here of all shards, with ZeRO's shards, frozen parameters and buffers, one of
them registered with persistent=False; the bits of all losses and tensors after further steps, on 1 to 3 ranks, for
AdamW, SGD with momentum and SGD without, with dropout and with fp16; another layout and another batch size; that the
state is JSON; replicas that train separately; checkpoints that are damaged, or that one rank cannot read: a note,
trainer.notify("on_note", text), before the next one is tried, and DamagedError if it was the last; and a checkpoint of
another text or model, which must raise UserError. After an error the progress and the parameters are as they were.

You may call:
    make_shards(kind, spec, tensor, rank) -> list   of the Shards `kind/NAME` of a tensor or of one number
    named_tensors(model) -> {name: tensor}   all parameters and buffers; isinstance(tensor, nn.Parameter)
    assemble_replica_shards(engine, own, shared) -> list   if engine.merger is not None; own: masters and their states;
        shared: all else
    on_all_ranks(action, group) -> list, read_index(folder) -> dict, load(folder, shards, group) -> dict, the index
    require_same_run(trainer, path, state)   raises UserError; trainer.control   the group of all ranks
    create_optimizer_states(engine, index["tensors"])   zeros for all optimizer states of a checkpoint
    engine.reducer.update_parameters()   collective: masters to the model's parameters; Progress(step, samples)

Check it with: python -m exercises check same_run_resume

Stub c77b5f45.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from minidist.errors import DamagedError
from minidist.simple.checkpoint import Shard, load, on_all_ranks, read_index
from minidist.simple.engine import Engine
from minidist.simple.parallelize import named_tensors
from minidist.simple.trainer import Trainer
from minidist.simple.training_state import (
    Progress,
    assemble_replica_shards,
    create_optimizer_states,
    make_shards,
    require_same_run,
)


def state_shards(engine: Engine) -> list[Shard]:
    """Return this rank's shards of all tensors that the next steps depend on; loading fills these very tensors.

    `params/NAME`: masters and frozen parameters. `buffers/NAME`: also non-persistent ones. `optimizer.KEY/NAME`, like
    `optimizer.exp_avg/model.norm.weight`: the optimizer's states, none before its first step. NAME: in the full model.
    """
    raise NotImplementedError("return the shards of all tensors that the next steps depend on")


def json_state(trainer: "Trainer") -> dict[str, Any]:
    """Return all that later steps depend on except tensors, and the run's options and corpus, as a JSON object."""
    raise NotImplementedError("return everything else that the next steps depend on")


def load_json_state(trainer: "Trainer", state: Mapping[str, Any]) -> None:
    """Set the trainer's progress and loss scale to those that `json_state` returned."""
    raise NotImplementedError("set what json_state returned")


def resume(trainer: "Trainer", paths: Sequence[Path]) -> Path | None:
    """Collective: load the first intact checkpoint of `paths`; return its path, or None if `paths` is empty.

    Any layout, and either engine, may have saved it. The observers get a note about each damaged checkpoint. Raises,
    on all ranks, DamagedError if all of `paths` are damaged, and UserError if a checkpoint is of another run.
    """
    raise NotImplementedError("load the first intact checkpoint and set everything that decides the next step")
