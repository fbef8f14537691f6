"""Live recovery: ranks die, the others go on without them, and new ranks join (7.7).

Restrictions: data parallelism only, so that every rank holds the full state; and no rank dies while others recover.
The fast version is `minidist.tools.recovery`.
"""

import warnings
from collections.abc import Callable

from minidist.comm import CommError, Group, all_gather_object, broadcast
from minidist.fault.collective_errors import ErrorOnAnyRank
from minidist.fault.disk import Disk
from minidist.fault.simple.agreement import train_step
from minidist.fault.simple.checkpoint import save
from minidist.fault.simple.run import Run, create_optimizer_states, resume, run_shards, run_state, set_run_state


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
