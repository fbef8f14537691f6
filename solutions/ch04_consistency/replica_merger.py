"""Merges of replicas in the trainer: the solution, as it stands in minidist.simple.consistency.

The weight is the number of tokens since the last merge, and not that of the last step: a replica that has skipped a
step, or got shorter samples, has contributed less to the round. A checkpoint between two merges must keep the count,
and DiLoCo's start and velocity: a run that goes on without them is another run, whose loss looks the same.

Each master is merged by itself. It costs a few more messages than one flat tensor, but ranks that have the same
parameter, such as the two pipeline stages with a tied embedding, add the same numbers in the same order and stay
equal bit by bit. The last step always merges, because what is saved at the end is one model and not several.

All ranks must take the same decision. Whether a merge is due follows from the step alone, but whether there is
anything to merge follows from the sum over all replicas, which every one of them knows after the all-reduce.

Usual wrong answers:
* the package's own
* merges after every step
* counts tokens in float32, which cannot count beyond 2**24
* the count is a new tensor in every step, which shares nothing with the one that a checkpoint has overwritten
* sums the count itself over the replicas, so that all of them have the same weight
* merges when step, and not step + 1, is a multiple of h: in the very first step, and one step too late afterwards
* counts its own steps since the last merge, so that after a checkpoint it merges in other steps
* averages the masters in mode diloco as well
* begins a round with a new count, in float32
* merges every h steps only: the replicas differ at the end, and one of them is saved as the model
* merges flattened copies, which are dropped
* returns True although there was nothing to merge
* merges also if no replica has any tokens, which is an error on all ranks
* merges one flat tensor of all masters: ranks that have the same parameter beside others may add in another order
* sets the count to zero after the first master, so that the others have weight 0
* num_different_models is always 1: the run saves and stops between merges, where the replicas differ
* ignores the outer rate and momentum of the configuration
* makes outer steps in mode local as well
* a replica without tokens of its own leaves, and the others wait for it in the merge
* saves the present masters as the start of the next round
* outer_states returns copies: what a checkpoint loads into them is lost
* the weight is the tokens of the last step of the round
* does not set the count to zero after a merge: the weight is that of the whole run
* sums the counts over the replicas in every step: the replicas wait for each other, which local steps should avoid
* never merges
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
        self.h, self.num_steps = config.h, num_steps
        self.masters, self.group = dict(masters), group
        self.num_tokens = torch.zeros(1, dtype=torch.float64)
        self.num_different_models = 1
        self.outer: dict[str, OuterStep] = {}
        if config.mode == "diloco":
            for name, master in masters.items():
                self.outer[name] = OuterStep(master.detach(), config.outer_lr, config.outer_momentum)

    @torch.no_grad()
    def after_step(self, step: int, num_tokens: float) -> bool:
        """Collective over the replicas if a merge is due: merge the masters; return whether that has been done.

        step: the number of the step, from 0. num_tokens: that this replica has trained on in the step. If no replica
        has any since the last merge, nothing changes.
        """
        self.num_tokens += num_tokens
        is_due = (step + 1) % self.h == 0 or step + 1 == self.num_steps
        self.num_different_models = 1 if is_due else self.group.size
        if not is_due:
            return False
        total = self.num_tokens.to(self.group.world.control_device, copy=True)
        all_reduce(total, self.group)
        if total.item() == 0:
            return False
        for name, master in self.masters.items():
            if name in self.outer:
                self.outer[name].step(master, self.num_tokens.item(), self.group)
            else:
                merge_replicas(master, self.num_tokens.item(), self.group)
        self.num_tokens.zero_()
        return True

    def outer_states(self) -> dict[str, dict[str, Tensor]]:
        """Return DiLoCo's states, which a checkpoint needs: {"outer.start": {name: tensor}, "outer.velocity": ...}."""
        return {
            "outer.start": {name: outer.start for name, outer in self.outer.items()},
            "outer.velocity": {name: outer.velocity for name, outer in self.outer.items()},
        }
