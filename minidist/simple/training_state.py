"""The training state: all that the next steps depend on, as shards of global tensors and as a JSON object."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from minidist.errors import DamagedError, UserError, format_count
from minidist.parameters import Box, ParamSpec
from minidist.simple.checkpoint import Shard, load, on_all_ranks, read_index
from minidist.simple.engine import Engine
from minidist.simple.parallelize import named_tensors

if TYPE_CHECKING:
    from minidist.simple.trainer import Trainer


@dataclass(frozen=True)
class Progress:
    """How far a run has got: the number of completed steps, and of samples that they have consumed."""

    step: int = 0
    consumed_samples: int = 0


def make_shards(kind: str, spec: ParamSpec, tensor: Tensor, rank: int) -> list[Shard]:
    """Return the shards of a parameter, or of an optimizer state of it.

    kind: prefix of the shards' names. spec: the parameter's. tensor: the boxes of `spec`, one after the other; or one
    number, such as AdamW's step count, which the rank with the parameter's first element saves.
    """
    name = f"{kind}/{spec.name}"
    is_saved_here = spec.owner == rank
    if not tensor.dim():
        return [Shard(name, (), Box((), ()), tensor, is_saved_here and not any(spec.boxes[0].start))]
    parts = zip(spec.boxes, tensor.detach().view(-1).split([box.numel for box in spec.boxes]), strict=True)
    return [Shard(name, spec.shape, box, part.view(box.shape), is_saved_here) for box, part in parts]


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


def assemble_replica_shards(engine: Engine, own: Sequence[Shard], shared: Sequence[Shard]) -> list[Shard]:
    """Return a separately trained replica's shards: `own`, `shared` (the first replica saves these), the merger's."""
    merger, prefix = engine.merger, replica_prefix(engine)
    own = [replace(shard, name=prefix + shard.name) for shard in own]
    own.append(Shard(f"{prefix}merge/tokens", (1,), Box.whole((1,)), merger.num_tokens, engine.control.rank == 0))
    shared = [*shared]
    for kind, states in merger.outer_states().items():
        for name, state in states.items():
            shared += make_shards(kind, engine.parallel.master_specs[name], state, engine.groups.world.rank)
    return own + [replace(shard, is_saved_here=shard.is_saved_here and not prefix) for shard in shared]


def replica_prefix(engine: Engine) -> str:
    """Return the prefix in the names of a replica's own tensors: "" for the first, then "replica-1." and so on."""
    replica = 0 if engine.merger is None else engine.merger.group.rank
    return f"replica-{replica}." if replica else ""


def create_optimizer_states(engine: Engine, tensors: Mapping[str, Any]) -> None:
    """Replace the optimizer states by those that a checkpoint has, as zeros; a new optimizer has none before a step.

    tensors: the checkpoint's, by name, as in its index; those that are no optimizer state are ignored.
    """
    engine.optimizer.state.clear()
    prefix = f"{replica_prefix(engine)}optimizer."
    for stored, entry in tensors.items():
        kind, _, name = stored.partition("/")
        if kind.startswith(prefix) and name in engine.reducer.masters:
            master = engine.reducer.masters[name]
            value = torch.zeros_like(master) if entry["shape"] else torch.zeros((), device=master.device)
            engine.optimizer.state[master][kind.removeprefix(prefix)] = value


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


def require_same_run(trainer: "Trainer", path: Path, state: Mapping[str, Any]) -> None:
    """Collective: raise UserError unless `state` is of a run with the same number of replicas and the same corpus."""
    trainer.check_resume(path)
    saved, replicas = state["replicas"], trainer.config.num_replicas(trainer.mesh)
    if saved != replicas:
        raise UserError(
            f"{path} has the state of {format_count(saved, 'replica')}, this run has {replicas}: "
            f"give --consistency.replicas {saved}, or start a new run."
        )
    if state["corpus"] != trainer.corpus.fingerprint:
        raise UserError(
            f"{path} was trained on another corpus ({state['corpus_name']}) than this run has "
            f"({trainer.corpus.describe()}): give the same --data.source or --data.path, or another --folder."
        )


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
