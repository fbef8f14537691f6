"""Merges of replicas in the trainer.

In the trainer a replica is a whole layout of ranks, with one tensor per parameter, and the optimizer updates these
tensors, the masters. Write the class that the training loop calls after each step: it merges the masters of all
replicas every h steps, by local SGD or DiLoCo, and has what a checkpoint needs between two merges.

config.mode is "local" or "diloco"; config.h the number of steps between merges; config.outer_lr and
config.outer_momentum are those of DiLoCo's outer steps. masters: a dict of tensors of any shapes by name, equal in all
replicas at the start. group: the ranks at the same place in each replica, of which this is one. num_steps: of the run.

after_step(step, num_tokens) is called on every rank after each optimizer step, with step 0, 1, ... and the number of
tokens that this replica has trained on in that step, 0.0 if the step was skipped. A merge is due if step + 1 is a
multiple of h or equals num_steps. It merges each master by itself, in place, with the replica's tokens since the last
merge as its weight; mode "diloco" makes one outer step per master instead. after_step returns whether it has merged.
If no replica has any token since the last merge, it changes nothing and returns False, although a merge is due.

num_tokens is a tensor of shape (1,) in float64, the weight so far: 0 after a merge. num_different_models is 1 until the
first step, and after each step in which a merge is due; after the other steps it is the number of replicas.
outer_states() returns {"outer.start": {name: start}, "outer.velocity": {name: velocity}} with the states of each
master's outer step; the inner dicts are empty in mode "local". A checkpoint saves num_tokens and these states, and
overwrites them in place in a new ReplicaMerger, whose first step may be a later one; you may replace these tensors by
others in any step.

Example: two replicas, h = 2, num_steps = 5. Merges are due in steps 1, 3 and 4. Steps 0 and 1 with 8 and 2 tokens on
replica 0, with 10 and 0 on replica 1: the weights of the merge in step 1 are 10 and 10, and then num_tokens is 0.

Checked: in which steps it merges, and what it returns then; the masters after each step, in both modes and on 1 to 3
replicas, compared with all replicas in one process; weights over uneven and skipped steps, a replica without tokens
and NaN in its masters, a round without any tokens; num_tokens and num_different_models after every step; outer_states,
also after a checkpoint has overwritten num_tokens and the states in place; that nothing is sent in the other steps, and
each master is all-reduced once in a merge, in its dtype; and that masters may require gradients.

You may call:
    merge_replicas(parameters, weight, group)   overwrites the parameters of all ranks by their weighted mean
    OuterStep(parameters, lr, momentum), OuterStep.step(parameters, weight, group), OuterStep.start, OuterStep.velocity
    all_reduce(tensor, group)   replaces the tensor by the sum over all ranks; group.size is the number of ranks
    Tensor.to(group.world.control_device, copy=True)   a copy on the device where a few numbers are all-reduced
    torch.zeros(1, dtype=torch.float64), Tensor.detach(), Tensor.zero_(), Tensor.item()

Check it with: python -m exercises check replica_merger

Stub 7cc9b486.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from minidist.comm import Group, all_reduce
from minidist.config import ConsistencyConfig
from minidist.simple.consistency import OuterStep, merge_replicas


class ReplicaMerger:
    """Merges the masters of replicas that train separately: every h steps, and after the last step.

    Each parameter is merged by itself: ranks that have the same parameter, such as the two stages with a tied
    embedding, then add the same numbers in the same order, and stay equal bit by bit.

    config: mode is "local" or "diloco". masters: this rank's, by name. group: the ranks at the same place in each
    replica, which have the same elements. num_steps: of the run.

    num_tokens: (1,), trained on since the last merge: the weight of the replica. A checkpoint overwrites it in place.
    num_different_models: the number of replicas, or 1 at the start and after a step in which a merge was due.
    """

    def __init__(self, config: ConsistencyConfig, masters: Mapping[str, Tensor], group: Group, num_steps: int):
        raise NotImplementedError("note what later calls need, and make an outer step per master for diloco")

    @torch.no_grad()
    def after_step(self, step: int, num_tokens: float) -> bool:
        """Collective over the replicas if a merge is due: merge the masters; return whether that has been done.

        step: the number of the step, from 0. num_tokens: that this replica has trained on in the step. If no replica
        has any since the last merge, nothing changes.
        """
        raise NotImplementedError("count the tokens, and merge the masters if a merge is due")

    def outer_states(self) -> dict[str, dict[str, Tensor]]:
        """Return DiLoCo's states, which a checkpoint needs: {"outer.start": {name: tensor}, "outer.velocity": ...}."""
        raise NotImplementedError("return the states of all outer steps by kind and name")
