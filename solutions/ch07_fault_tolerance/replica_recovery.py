"""Ranks die, and training goes on: the solution, as it stands in minidist.fault.simple.agreement and
minidist.fault.simple.recovery.

An aborted step can be repeated because nothing was written before the ranks had agreed (7.5), and repeated by fewer
ranks because samples, dropout masks and weights are functions of the step and not of the ranks (7.3). So a death
costs the time of one step and of a new group, and the result is that of the run which nothing interrupted, but for
rounding.

The state needs care in one case: the all-reduce may have ended on some ranks and not on others when the connection
breaks. Then some survivors are one step ahead. Their state is as good as any, and the others take it; a new rank is
the same case, with a state that is further behind. The ranks gather the steps first, because no rank knows who is
ahead.

Recovery closes the old connections before it waits: a survivor that has not yet noticed the death may wait for one
that has. And it runs after the except block, because the traceback of the error would keep those connections alive.

Usual wrong answers:
* gathers the full state of every rank as pickled objects, to use one of them
* every rank reads the newest checkpoint after a death: right, but it repeats what the memory still holds
* does not look for a checkpoint
* the package's own
* every rank computes the part of rank 0
* takes every error for a death, and repeats a step that can never succeed
* a full disk ends the run, although all ranks are well
* regroups after every step, which costs a new group each time
* dropout masks of the rank: a repeated step has others
* divides by the number of its own samples: the sum over the ranks grows with their number
* the mean of its own samples over the number of ranks, as DDP does: samples on ranks with fewer count more
* repeats the step with the next batch: the samples of the aborted one are never seen
* regroups after a death only: a new process waits until the run is over, and begins anew
* does not close the old group: a rank that still waits for this one waits for ever
* all go back to the rank that is furthest behind: a new rank, which is at step 0
* sends the parameters, and not the moments of the optimizer
* keeps the part that it had in the first group: the samples of the dead rank are lost
* as many samples on each rank: those that are left over are in no rank's part
* a death in a save ends the run
* does not multiply by the loss scale, by which the update divides
* rank 0 sends its state, even if it is the one that is behind
* takes over the number of the step, and neither position nor seed nor loss scale
* counts the aborted step as done, and goes on with the next
* gradients of zero
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
    samples = samples_at(run.seed, run.position, run.batch_size, run.num_samples)
    parameters, scale = list(run.model.parameters()), 1.0 if run.scaler is None else run.scaler.scale
    totals = [torch.zeros_like(parameter) for parameter in parameters]
    for sample in samples[group.rank :: group.size]:
        torch.manual_seed(int(hash64(run.seed, run.step, sample)) >> 1)  # of dropout
        loss = run.sample_loss(sample) * (scale / run.batch_size)
        for total, gradient in zip(totals, torch.autograd.grad(loss, parameters), strict=True):
            total += gradient
    return totals


def recover(run: Run, group: Group | None, rendezvous: Callable[[Group | None], Group]) -> Group:
    """Collective: form a group of all living ranks, copy the most advanced rank's state to all, and return the group.

    Called by every survivor after a CommError, and by a new rank that joins, with group None. Survivors may be one step
    apart: some have made the update of the aborted step, others not. rendezvous: closes the connections of the given
    group, so that a rank which still waits for this one gets a CommError too; waits until all living ranks have called
    it; returns a group of them.
    """
    group = rendezvous(group)
    own = [(shard.name, (shard.shape, shard.dtype_name)) for shard in run_shards(run, False)]
    states = all_gather_object((run.step, run_state(run), own), group)
    source = max(range(group.size), key=lambda rank: states[rank][0])  # the first of the most advanced ranks
    _, state, tensors = states[source]
    if group.rank != source:
        create_optimizer_states(run, dict(tensors))
        set_run_state(run, state)
    received = {shard.name: shard.tensor.detach() for shard in run_shards(run, False)}
    for name, _ in tensors:
        broadcast(received[name], source, group)
    return group


def train(
    run: Run, disk: Disk, rendezvous: Callable[[Group | None], Group], steps: int, save_every: int, join: bool = False
) -> Group:
    """Collective: train until `steps` steps are complete, whatever ranks die meanwhile; return the last group.

    disk, rendezvous: as for `save` and `recover`. save_every: steps between two checkpoints, after which new ranks are
    admitted. join: whether this rank joins a run of other ranks; if not, it resumes the run on `disk`, or begins one.
    """
    group = recover(run, None, rendezvous)
    if not join:
        resume(run, disk, group)
    while run.step < steps:
        try:
            train_step(run, group)
            if must_regroup := run.step % save_every == 0:
                save(disk, run.step, run_shards(run, group.rank == 0), run_state(run), group)
        except ErrorOnAnyRank as failure:  # such as a full disk: the earlier checkpoints are still there
            warnings.warn(f"step {run.step} was not saved: {failure}", stacklevel=2)
        except CommError:
            must_regroup = True
        if must_regroup:  # not in `except`, where the error's traceback would keep the connections of `group` open
            group = recover(run, group, rendezvous)
    return group
