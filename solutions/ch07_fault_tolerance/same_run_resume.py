"""The resumed run is the same run: the solution, as it stands in minidist.simple.training_state.

The loss goes on falling after almost any resume, so a loss curve proves nothing. What decides the next step is a
list: parameters, buffers, optimizer states (moments and Adam's step count), the position in the data and the number
of the step, from which the learning rate and the random numbers follow, and the loss scale with its count of good
steps. If one is missing, the run is another one, with the same name.

With 16-bit parameters it is the masters that are saved: the parameters are rounded from them, and the bits below are
what small updates add up in. A checkpoint that is damaged is passed over, as an older one is better than none. A
tensor that does not fit is another matter: no older checkpoint would fit, so the error is raised. The list of paths
is the same on all ranks, because ranks that resume from different steps would train different models.

Usual wrong answers:
* resumes on another text
* begins anew if all checkpoints are damaged, and overwrites them
* the package's own
* loads nothing, and returns the path
* exchanges outcomes in the engine's group, which is one replica's if replicas train separately: each resumes from
  another checkpoint
* collects copies: loading fills them, and the run keeps its own values
* passes over a checkpoint that does not fit: a forgotten option starts another run
* calls frozen parameters and buffers the replica's own: each replica saves them once more, under other names
* describes ZeRO's shards as full parameters
* a rank that cannot read an index goes on to the next checkpoint by itself
* loads the masters and does not copy them to the 16-bit parameters
* tries the newest checkpoint only
* leaves out the buffers
* leaves out the frozen parameters: a new run has other ones
* also announces the checkpoint before the oldest one, which does not exist
* loads the oldest intact checkpoint
* leaves the text of the configuration out of the JSON state
* creates new optimizer states and does not load them
* takes buffers from the state_dict, which leaves out those registered with persistent=False
* begins the data again
* computes the position from the step and this run's batch size
* replicas that train separately save their tensors under the same names
* sets the loss scale and not the count of good steps
* saves False for the loss scaler of a run that has none
* asks only whether the checkpoint has the state of a loss scaler: a run in fp32 has none to load it
* asks only whether this run has a loss scaler: a checkpoint in fp32 has no state of one
* passes over a damaged checkpoint without a note
* sets the progress before the tensors are verified: after a damaged checkpoint the run has its step
* loads only into the optimizer states that exist: a new optimizer has none
* repeats the warm-up of the learning rate and the dropout masks of the first steps
* collects nothing
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
    rank = engine.groups.world.rank
    own, shared = [], []  # of this replica; of all replicas
    for name, master in engine.reducer.masters.items():
        spec = engine.parallel.master_specs[name]
        own += make_shards("params", spec, master, rank)
        for key, value in engine.optimizer.state[master].items():
            own += make_shards(f"optimizer.{key}", spec, value, rank)
    for name, tensor in named_tensors(engine.model).items():
        if not tensor.requires_grad:
            kind = "params" if isinstance(tensor, nn.Parameter) else "buffers"
            shared += make_shards(kind, engine.parallel.specs[name], tensor, rank)
    return own + shared if engine.merger is None else assemble_replica_shards(engine, own, shared)


def json_state(trainer: "Trainer") -> dict[str, Any]:
    """Return all that later steps depend on except tensors, and the run's options and corpus, as a JSON object."""
    return {
        "config": trainer.config_text,
        "step": trainer.progress.step,
        "position": trainer.progress.consumed_samples,
        "corpus": trainer.corpus.fingerprint,
        "corpus_name": trainer.corpus.describe(),
        "replicas": trainer.config.num_replicas(trainer.mesh),
        "loss_scaler": trainer.engine.scaler and trainer.engine.scaler.state_dict(),
    }


def load_json_state(trainer: "Trainer", state: Mapping[str, Any]) -> None:
    """Set the trainer's progress and loss scale to those that `json_state` returned."""
    if trainer.engine.scaler is not None and state["loss_scaler"]:
        trainer.engine.scaler.load_state_dict(state["loss_scaler"])
    trainer.progress = Progress(state["step"], state["position"])


def resume(trainer: "Trainer", paths: Sequence[Path]) -> Path | None:
    """Collective: load the first intact checkpoint of `paths`; return its path, or None if `paths` is empty.

    Any layout, and either engine, may have saved it. The observers get a note about each damaged checkpoint. Raises,
    on all ranks, DamagedError if all of `paths` are damaged, and UserError if a checkpoint is of another run.
    """
    engine, control = trainer.engine, trainer.control
    for path in paths:
        try:
            index = on_all_ranks(lambda path=path: read_index(path), control)[control.rank]
            require_same_run(trainer, path, index["state"])
            create_optimizer_states(engine, index["tensors"])
            load_json_state(trainer, load(path, state_shards(engine), control)["state"])
            engine.reducer.update_parameters()
            return path
        except DamagedError as error:
            if path == paths[-1]:
                raise
            trainer.notify("on_note", f"{error} Trying the checkpoint before it.")
    return None
