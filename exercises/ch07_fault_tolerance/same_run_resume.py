"""The resumed run is the same run.

A resumed run must take the same steps as a run that was never interrupted, bit by bit. Collect everything that decides
the next step, as tensors and as a JSON object, and continue from the newest checkpoint that is intact.

run: a Run (minidist/fault/simple/run.py); model, optimizer, scaler, step, position and seed belong to its state. A
parameter's optimizer states are run.optimizer.state[parameter], a dict like {"step": scalar tensor, "exp_avg": tensor},
empty before the first step. Example: a model with one parameter "w" of shape (3,) and AdamW, after 5 steps of 4
samples: run_shards has params/w, optimizer.step/w, optimizer.exp_avg/w and optimizer.exp_avg_sq/w, each one full
box; run_state is {"step": 5, "position": 20, "seed": 1, "scaler": None}, or with the scaler's state_dict().

Checked: the bits of all tensors after further steps, for AdamW, SGD with momentum and SGD without, on 1 to 3 ranks,
with dropout, a loss scale that changes and buffers that change, one of them registered with persistent=False; a resumed
run with another batch size; that the state is JSON; and damaged checkpoints, for which the newest intact checkpoint
before them is used.

You may call:
    read_index(disk, folder) -> dict, load(disk, folder, shards, group) -> state   raise on damage; load on all ranks
    create_optimizer_states(run, {name: (shape, dtype name)})   zeros for all optimizer states among the names
    run_on_all_ranks(gather, action), bind_all_gather_object(group), all_gather_object(value, group) -> list
    TensorShard(name, shape, box, tensor, is_saved_here), Box.whole(shape)
    disk.names(), disk.rename(old, new), complete_checkpoints(disk) -> list, ErrorOnAnyRank.found_damage, warnings.warn

Check it with: python -m exercises check same_run_resume

Stub fd1ee32a.
"""

import warnings

from minidist.comm import Group, all_gather_object, bind_all_gather_object
from minidist.fault.agree import ErrorOnAnyRank, run_on_all_ranks
from minidist.fault.disk import Disk
from minidist.fault.shards import TensorShard
from minidist.fault.simple.checkpoint import complete_checkpoints, load, read_index
from minidist.fault.simple.run import Run, create_optimizer_states
from minidist.parameters import Box


def run_shards(run: Run, is_saved_here: bool) -> list[TensorShard]:
    """Return all tensors of a run, unsharded, as `TensorShard`s: parameters, buffers and optimizer states.

    The buffers include non-persistent ones, which `state_dict` leaves out: the next step may depend on them. The names
    of the tensors are `params/NAME`, `buffers/NAME` and `optimizer.KEY/NAME`, as `optimizer.exp_avg/layer.weight`.
    is_saved_here: whether this rank saves them.
    """
    raise NotImplementedError("return all tensors that the next steps depend on")


def run_state(run: Run) -> dict:
    """Return a run's state outside of its tensors, as a JSON object: step, position, seed and loss scale."""
    raise NotImplementedError("return everything else that the next steps depend on")


def set_run_state(run: Run, state: dict) -> None:
    """Set a run's step, position, seed and loss scale to those that `run_state` returned."""
    raise NotImplementedError("set what run_state returned")


def resume(run: Run, disk: Disk, group: Group) -> bool:
    """Collective: load the newest intact checkpoint into the run; return whether there was one.

    Parameters, buffers, optimizer states, step, position, seed and loss scale all become those of the checkpoint. A
    damaged checkpoint is renamed to `.damaged`, and the one before it is tried.
    """
    raise NotImplementedError("load the newest intact checkpoint and set everything that decides the next step")
