"""The resumed run is the same run: the solution, as it stands in minidist.fault.simple.run.

The loss goes on falling after almost any resume, so a loss curve proves nothing. What decides the next step is a
list: parameters, buffers, optimizer states (moments and Adam's step count), the position in the data and the number
of the step, from which the learning rate and the random numbers follow, the seed and the loss scale with its count of
good steps. If one is missing, the run is another one, with the same name.

A checkpoint that is damaged is not used, but not deleted either: it is renamed, so that a person can look at it, and
the name is free when the run reaches that step again. A tensor that does not fit is another matter: no older
checkpoint would fit, so the error is raised. Rank 0's list of folders is used by all ranks, because ranks that resume
from different steps would train different models.

Usual wrong answers:
* the package's own
* says that it has resumed, and begins anew
* copies the tensors, so that the copies are loaded
* deletes the damaged checkpoint, at which nobody can look any more
* every rank renames the damaged folder, which only the first of them still finds
* ends with an error if the newest checkpoint is damaged
* saves no buffers
* treats a checkpoint that does not fit as damaged, and begins anew without a word
* takes the oldest checkpoint
* each rank follows its own list of folders: a rank that sees an older list resumes from another step
* saves no optimizer states
* saves the buffers of the state_dict, which has no non-persistent ones
* begins the data anew
* computes the position from the step: wrong if the batch size has changed
* leaves out scalars, among them Adam's step count
* restores the loss scale, but not the count of good steps
* keeps the seed of the new run
* takes over step and position from the index before the files are verified
* loads into the optimizer states that a new optimizer has, which are none
* counts steps from 0: the learning rate and the dropout masks are those of the first steps
* knows the states of AdamW, and loses the momentum of SGD
* saves no tensor
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
    tensors = {f"params/{name}": parameter for name, parameter in run.model.named_parameters()}
    tensors |= {f"buffers/{name}": buffer for name, buffer in run.model.named_buffers()}
    for name, parameter in run.model.named_parameters():
        states = run.optimizer.state.get(parameter, {})
        tensors |= {f"optimizer.{key}/{name}": value for key, value in states.items()}
    return [TensorShard(n, t.shape, Box.whole(tuple(t.shape)), t, is_saved_here) for n, t in tensors.items()]


def run_state(run: Run) -> dict:
    """Return a run's state outside of its tensors, as a JSON object: step, position, seed and loss scale."""
    scaler = None if run.scaler is None else run.scaler.state_dict()
    return {"step": run.step, "position": run.position, "seed": run.seed, "scaler": scaler}


def set_run_state(run: Run, state: dict) -> None:
    """Set a run's step, position, seed and loss scale to those that `run_state` returned."""
    run.step, run.position, run.seed = state["step"], state["position"], state["seed"]
    if run.scaler is not None:
        run.scaler.load_state_dict(state["scaler"])


def resume(run: Run, disk: Disk, group: Group) -> bool:
    """Collective: load the newest intact checkpoint into the run; return whether there was one.

    Parameters, buffers, optimizer states, step, position, seed and loss scale all become those of the checkpoint. A
    damaged checkpoint is renamed to `.damaged`, and the one before it is tried.
    """
    for folder in reversed(all_gather_object(complete_checkpoints(disk), group)[0]):
        try:
            [index, *_] = run_on_all_ranks(bind_all_gather_object(group), lambda at=folder: read_index(disk, at))
            create_optimizer_states(run, {name: (t["shape"], t["dtype"]) for name, t in index["tensors"].items()})
            set_run_state(run, load(disk, folder, run_shards(run, False), group))
            return True
        except ErrorOnAnyRank as failure:
            run.optimizer.state.clear()
            if not failure.found_damage:
                raise
            warnings.warn(f"{folder} is not used: {failure}", stacklevel=2)
            if group.rank == 0:
                disk.rename(folder, f"{folder}.damaged")
    return False
