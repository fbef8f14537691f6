"""Ranks lose their state, and training goes on.

When a rank dies, the others should not: they form new process groups without it, and continue from what they have in
memory; a new rank joins later. Give every rank without a valid training state that of its replicas.

trainer: this rank's, in the groups of now. source: the trainer with this rank's state: the same one; an earlier one
with the same shards, if new groups have been formed; or None if this rank is new or its state is damaged. An earlier
one is only read: its groups are closed. The healthy ranks are those with a source at the newest step; all others
receive. Result: the ascending global ranks that receive. A training state is what 7.3 saves:
all tensors of state_shards, and the JSON state.

Example: ranks 0, 1 and 2 have replicas of everything. In step 4 rank 1 was killed; rank 0 had made its update already
and rank 2 had not. A new process is rank 1 now. recover(trainer, old) on ranks 0 and 2 and recover(trainer, None) on
rank 1 return [1, 2] on all: rank 0 has sent its parameters, masters and moments to both, and all are at step 5. With
two tensor-parallel ranks 0 and 1, and 2 and 3 as replicas of them, rank 1 receives from rank 3 only.

Checked: all tensors, the progress and the loss scale, bit by bit, on every rank and one step later, on 2 to 4 ranks,
for data parallelism, fp16, tensor parallelism, and a pipeline with tied embeddings; whichever rank has lost its state
or is ahead, also before the first step; that a shard without a healthy replica, as with ZeRO, raises RunError on all
ranks and changes nothing; the bytes that each rank receives; and processes that are killed with SIGKILL, and one that
joins, compared with an uninterrupted run.

You may call:
    collect_state_metadata(trainer) -> {"json": JSON state, with "step", "tensors": {name: {"shape": shape}}}
    shard_replicas(trainer) -> {NAME: global ranks}   with the same shard of a parameter and its states, or of a buffer
    require_replicas(trainer, healthy)   collective; RunError on all ranks if a shard of any rank has no healthy replica
    load_json_state(trainer, state)
    create_optimizer_states(trainer.engine, tensors)   this rank's, as zeros; tensors: of all healthy ranks' metadata
    state_shards(trainer.engine) -> list   of Shards with name ("optimizer.exp_avg/NAME"), box, tensor: the very memory
    trainer.engine.control   the group of all ranks; group.ranks, its global ranks; trainer.world.rank, this one
    all_gather_object(value, group); send(tensor, dst, group), recv(tensor, src, group)   dst, src: index in group.ranks
    trainer.engine.reducer.update_parameters()   collective: copies the masters to the model's parameters

Check it with: python -m exercises check replica_recovery

Stub 0f464703.
"""

import torch

from minidist.comm import all_gather_object, recv, send
from minidist.simple.recovery import collect_state_metadata, require_replicas, shard_replicas
from minidist.simple.trainer import Trainer
from minidist.simple.training_state import create_optimizer_states, load_json_state, state_shards


def recover(trainer: "Trainer", source: "Trainer | None") -> list[int]:
    """Collective: send the state of healthy replicas to the ranks that have no valid one; return the ranks that got it.

    source: the trainer with this rank's state: `trainer` itself; an earlier one with the same shards, if a death led
    to new process groups; None if the state is damaged or lost. A rank behind the newest step also receives. Raises
    RunError on all ranks, and changes nothing, if a shard has no healthy replica, as with ZeRO.
    """
    raise NotImplementedError("give the ranks without a valid training state that of healthy replicas")
