"""Ranks die, and training goes on.

When a rank dies, the others should not: they repeat the step without the dead rank and continue; a new rank joins
later. Write the part of the gradient that a rank computes, which depends on how many ranks are left; the recovery of
the group and of its state; and the training loop around both.

run: see Run in minidist/fault/simple/run.py. rendezvous(group) closes the connections of the old group (None if there
is none), waits until all living ranks have called it, and returns their group. train_step(run, group) calls your
local_gradients, updates the parameters on all ranks or on none (7.5), and then counts run.step and run.position.

Example: batch_size=5, and the samples of step 4 are [3, 9, 0, 7, 5]. On 3 ranks, rank 1 computes the samples 9 and 5,
and returns (gradient of 9 + gradient of 5) / 5, times the loss scale. Rank 2 is killed before the all-reduce of step
4, which raises CommError on ranks 0 and 1. Both call recover, are ranks 0 and 1 of 2, and repeat step 4: rank 0 with
the samples 3, 0 and 5, rank 1 with 9 and 7. With save_every=3, recover is called again after the save of step 6; a
process that was started meanwhile with join=True is then rank 2 of 3, and has the state of the others.

Checked: the sum of the parts on 1 to 7 ranks, with dropout and a loss scale; the state of all ranks after recover,
whichever of them is ahead; processes that are killed with SIGKILL in a step, after an update and in a save, compared
with an uninterrupted run; a process that joins, which must read no file; a full disk, which must give a warning with
the number of the step and not end the run; checkpoints from which a new run resumes; and an error other than CommError,
which must end the run.

You may call:
    samples_at(seed, position, count, num_samples) -> list   the numbers of the samples of a global batch
    torch.manual_seed(int(hash64(run.seed, run.step, sample)) >> 1)   before each sample: its dropout masks
    run.sample_loss(sample) -> scalar tensor, torch.autograd.grad(loss, parameters), run.scaler.scale
    run_shards(run, is_saved_here) -> list   all tensors of a run, as TensorShards: name, shape, dtype_name, tensor
    run_state(run) -> dict, set_run_state(run, state)   step, position, seed and scaler
    create_optimizer_states(run, {name: (shape, dtype name)})   zeros for those among the names; deletes the others
    all_gather_object(value, group) -> list, broadcast(tensor, source, group)   fills the tensor from rank `source`
    train_step(run, group), resume(run, disk, group)   raise CommError if a rank is gone
    save(disk, step, shards, state, group)   raises CommError, or ErrorOnAnyRank if a disk is full; warnings.warn

Check it with: python -m exercises check replica_recovery

Stub 5b1cd436.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from minidist.comm import CommError, Group, all_gather_object, broadcast
from minidist.fault.agree import ErrorOnAnyRank
from minidist.fault.disk import Disk
from minidist.fault.simple.agreement import train_step
from minidist.fault.simple.checkpoint import save
from minidist.fault.simple.run import (
    Run,
    create_optimizer_states,
    resume,
    run_shards,
    run_state,
    samples_at,
    set_run_state,
)
from minidist.hashing import hash64


def local_gradients(run: Run, group: Group) -> list[Tensor]:
    """Return this rank's part of the gradient of the global batch, one tensor per parameter, times the loss scale.

    The parts of all ranks of `group` sum to the gradient of the mean loss over the global batch of the next step. That
    gradient does not depend on the number of ranks, nor do the samples and their dropout masks, so the remaining ranks
    can repeat an aborted step. Raises what `run.sample_loss` raises.
    """
    raise NotImplementedError("return this rank's part of the gradient of the global batch")


def recover(run: Run, group: Group | None, rendezvous: Callable[[Group | None], Group]) -> Group:
    """Collective: form a group of all living ranks, copy the most advanced rank's state to all, and return the group.

    Called by every survivor after a CommError, and by a new rank that joins, with group None. Survivors may be one step
    apart: some have made the update of the aborted step, others not. rendezvous: closes the connections of the given
    group, so that a rank which still waits for this one gets a CommError too; waits until all living ranks have called
    it; returns a group of them.
    """
    raise NotImplementedError("form the new group, and give all ranks the state of the most advanced")


def train(
    run: Run, disk: Disk, rendezvous: Callable[[Group | None], Group], steps: int, save_every: int, join: bool = False
) -> Group:
    """Collective: train until `steps` steps are complete, whatever ranks die meanwhile; return the last group.

    disk, rendezvous: as for `save` and `recover`. save_every: steps between two checkpoints, after which new ranks are
    admitted. join: whether this rank joins a run of other ranks; if not, it resumes the run on `disk`, or begins one.
    """
    raise NotImplementedError("train until `steps` steps are complete, whatever ranks die")
