"""Ranks lose their state, and training goes on: the solution, as it stands in minidist.simple.recovery.

An aborted step can be repeated because nothing was written before the ranks had agreed (7.5), and repeated by fewer
ranks because samples, dropout masks and weights are functions of the step and not of the ranks (7.3). So a death
costs the time of one step and of a new group, and the result is that of the run which nothing interrupted, but for
rounding.

The state needs care in one case: the all-reduce may have ended on some ranks and not on others when the connection
breaks. Then some survivors are one step ahead. Their state is as good as any, and the others take it; a new rank is
the same case, with a state that is further behind. The ranks gather the steps first, because no rank knows who is
ahead.

Every rank plans all transfers from what has been gathered, so that none asks another one for anything, and all go
over the shards in one order: send and receive meet. With ZeRO a shard is on one rank only, and what died with it is
in the last checkpoint, or in a copy that another rank keeps.

Usual wrong answers:
* a rank that is behind and has kept its trainer gets the tensors only
* the package's own
* always says that rank 0 has received
* sends all shards of the first healthy rank: with tensor parallelism those are others
* takes every rank with a source for healthy: those that are one step behind keep their state
* sends no buffers
* sends the tensors only: a new trainer begins the data and the learning rates again
* does not ask whether every shard has a healthy replica
* sends nothing before the first step, as if no rank could have lost its parameters
* does not copy the masters to the 16-bit parameters
* sends the parameters and no moments
* asks only whether a shard is on a rank with a source: a rank that is one step behind has it, and nothing to send
* a healthy rank with a new trainer keeps its initial values
* changes progress and optimizer states before it knows that every shard has a healthy replica
* sends everything as float32: masters and states in float64 lose their last bits
* sends to healthy replicas, too
* pairs the shards in the order of each trainer's optimizer states, which may differ
* sorts the shards by the parameter only: its master and optimizer states come in the order of each trainer
* a new trainer has no optimizer states to receive
* finds the ranks and sends nothing
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
    rank, group = trainer.world.rank, trainer.engine.control
    states = all_gather_object(None if source is None else collect_state_metadata(source), group)
    newest = max((state["json"]["step"] for state in states if state), default=0)
    healthy = {r: s for r, s in zip(group.ranks, states, strict=True) if s and s["json"]["step"] == newest}
    require_replicas(trainer, healthy)
    if source is not trainer or rank not in healthy:
        load_json_state(trainer, next(iter(healthy.values()))["json"])
        tensors = {name: entry for state in healthy.values() for name, entry in state["tensors"].items()}
        create_optimizer_states(trainer.engine, tensors)
    # One order on all ranks, so that no two ranks wait for each other.
    owners = trainer, source if rank in healthy else trainer
    targets, values = (sorted(state_shards(each.engine), key=lambda s: (s.name, s.box.start)) for each in owners)
    replicas_of = shard_replicas(trainer)
    for target, value in zip(targets, values, strict=True):
        replicas = set(replicas_of.get(target.name.partition("/")[2], group.ranks))
        buffer = value.tensor.to(group.world.control_device)
        data = buffer.view(-1).view(torch.uint8)  # not every backend sends every dtype
        sender = min(replicas & healthy.keys())
        for receiver in sorted(replicas - healthy.keys()):
            if rank == sender:
                send(data, group.ranks.index(receiver), group)
            elif rank == receiver:
                recv(data, group.ranks.index(sender), group)
        target.tensor.copy_(buffer)
    trainer.engine.reducer.update_parameters()
    return [each for each in group.ranks if each not in healthy]
