"""Merge the replicas of a run: local SGD, DiLoCo and gossip, for any layout inside a replica.

A replica trains by itself with all of its ranks: its gradients, loss, clipping norm and skipped steps are its own.
Every h steps each rank merges its elements of the masters with the ranks at the same place in the other replicas
(process group "outer"). The simple version is `simple.merge_replicas` and `simple.OuterStep`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from minidist.comm import Group, Groups, P2POp, all_reduce, batch_send_recv
from minidist.config import Config
from minidist.hashing import hash64
from minidist.parallel.data.reducer import GradientReducer


class ReplicaMerger:
    """Merges the replicas' master weights every h steps, weighted by tokens trained on since the last merge.

    reducer: the replica's gradient reducer, which holds the masters. groups: must contain "outer", the ranks with the
    same coordinates in each replica. replica: the number of this rank's replica. tokens: the (weighted) number of
    tokens since the last merge, () float64.
    """

    def __init__(self, config: Config, reducer: GradientReducer, groups: Groups):
        self._config, self._num_steps, self._seed = config.consistency, config.train.steps, config.train.seed
        self._group = groups["outer"]
        self._control_device = groups.world.control_device
        tensors = reducer.checkpoint_tensors()
        self._masters = {name: tensors[name] for name in reducer.master_specs}
        self.replica, self.tokens = self._group.rank, torch.zeros((), dtype=torch.float64)
        self._stop_requested = False
        self._start = self._velocity = None
        if self._config.mode == "diloco" and self._masters:
            self._start = self._flatten()
            self._velocity = torch.zeros_like(self._start)

    def outer_states(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield DiLoCo's states, equal in all replicas: ("outer.start" or "outer.velocity", parameter name, tensor)."""
        for kind, flat in (("outer.start", self._start), ("outer.velocity", self._velocity)):
            for name, part in self._parts(flat) if flat is not None else ():
                yield kind, name, part

    def merge_if_due(
        self, step: int, tokens: float, stop_requested: bool, checkpoint_written: bool
    ) -> tuple[bool, bool, bool]:
        """Collective over the replicas: merge their master weights if step number `step` (from 0) is the last of h.

        tokens: the (weighted) number of tokens in this replica's update. stop_requested, checkpoint_written: of this
        replica.
        Returns (merged, stop_requested, checkpoint_written), all False between merges. merged: whether the masters
        changed, so that the caller must update the parameters. stop_requested: whether any replica was asked to stop
        since the last merge. checkpoint_written: whether all replicas have written their files.
        """
        self.tokens += tokens
        self._stop_requested |= stop_requested
        if (step + 1) % self._config.h:
            return False, False, False
        own = float(self.tokens)
        sums = torch.tensor(
            [own, float(self._stop_requested), float(checkpoint_written)],
            dtype=torch.float64,
            device=self._control_device,
        )
        all_reduce(sums, self._group, async_op=True).wait(host=True)
        total, stops, written = sums.tolist()
        self.tokens.zero_()
        self._stop_requested = False
        if total > 0 and self._masters:
            self._merge(step, own, total)
        return total > 0, stops > 0, written == self._group.size

    @torch.no_grad()
    def _merge(self, step: int, own: float, total: float) -> None:
        flat = self._flatten()
        if self._config.mode == "gossip" and step + 1 < self._num_steps:
            flat = _average_with_neighbours(flat, own, self._neighbours(step), self._group)
        elif self._start is None:
            flat = self._average(flat, own / total)
        else:
            outer_gradient = self._average(self._start - flat, own / total)
            lr, momentum = self._config.outer_lr, self._config.outer_momentum
            self._velocity.mul_(momentum).add_(outer_gradient)
            flat = self._start.sub_(outer_gradient.add_(self._velocity, alpha=momentum), alpha=lr)
        for name, part in self._parts(flat):
            self._masters[name].copy_(part)

    def _average(self, flat: Tensor, share: float) -> Tensor:
        """Average over the replicas in place. A replica without tokens does not count, even if it is not finite."""
        flat = flat.mul_(share) if share else flat.zero_()
        all_reduce(flat, self._group)
        return flat

    def _neighbours(self, step: int) -> list[int]:
        """The replicas with which this replica exchanges parameters after a step."""
        size, at = self._group.size, self._group.rank
        if self._config.topology == "ring":
            return sorted({(at - 1) % size, (at + 1) % size} - {at})
        order = sorted(range(size), key=lambda replica: int(hash64(self._seed, step, replica)))  # random pairs
        partner = order.index(at) ^ 1
        return [order[partner]] if partner < size else []

    def _flatten(self) -> Tensor:
        """Copy this rank's elements of all masters into one tensor, of at least float32."""
        tensors = [master.detach().reshape(-1) for master in self._masters.values()]
        return torch.cat([tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors])

    def _parts(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        parts = flat.split([master.numel() for master in self._masters.values()])
        for (name, master), part in zip(self._masters.items(), parts, strict=True):
            yield name, part.view(master.shape)


def _average_with_neighbours(flat: Tensor, weight: float, neighbours: list[int], group: Group) -> Tensor:
    """Collective: return the weighted mean of `flat` (n,) over this rank and its neighbours.

    weight: this rank's. neighbours: group ranks. Returns `flat` itself if no weight is above 0.
    """
    message = torch.cat([flat, flat.new_tensor([weight])])
    arriving = [torch.empty_like(message) for _ in neighbours]
    transfers = [P2POp("send", message, rank) for rank in neighbours]
    transfers += [P2POp("recv", tensor, rank) for tensor, rank in zip(arriving, neighbours, strict=True)]
    batch_send_recv(transfers, group)
    counted = [each for each in (message, *arriving) if each[-1] > 0]
    if not counted:
        return flat
    total = sum(float(each[-1]) for each in counted)
    return sum(each[:-1] * (float(each[-1]) / total) for each in counted)
