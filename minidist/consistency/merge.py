"""Merge the replicas of a run: local SGD, DiLoCo and gossip, for any layout inside a replica.

A replica trains by itself with all of its ranks: its gradients, loss, clipping norm and skipped steps are its own.
Every h steps each rank merges its elements of the masters with the ranks at the same place in the other replicas
(process group "outer"). The simple version is `minidist.simple.consistency.ReplicaMerger`.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from minidist.comm import Group, Groups, P2POp, all_reduce, batch_send_recv
from minidist.comm.quantized import all_reduce_int8
from minidist.config import Config, ConsistencyConfig
from minidist.hashing import hash64
from minidist.parallel.data.reducer import GradientReducer

Result = TypeVar("Result")  # a `minidist.train.step_result.StepResult`


class _MergedTensors:
    """Masters that are merged as one flat tensor, and what the merger keeps for them, in at least float32.

    masters: this rank's elements, by parameter name. start, velocity: DiLoCo's parameters after the last merge and its
    outer momentum, (n,), equal in all replicas; None in other modes. error: (n,), what this rank's quantized messages
    have left out, of this replica alone; None without `consistency.exchange` int8.
    """

    def __init__(self, masters: Mapping[str, Tensor], how: ConsistencyConfig):
        self.masters = masters
        self.start = _flatten(masters) if how.mode == "diloco" else None
        self.velocity = torch.zeros_like(self.start) if how.mode == "diloco" else None
        self.error = torch.zeros_like(self.start) if how.quantizes else None

    def parts(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the elements of each parameter, (*shape of its master,), as views of `flat` (n,)."""
        parts = flat.split([master.numel() for master in self.masters.values()])
        for (name, master), part in zip(self.masters.items(), parts, strict=True):
            yield name, part.view(master.shape)


class ReplicaMerger:
    """Merges the replicas' masters every h steps, all together or in fragments of the model, h / fragments steps apart.

    Masters that several ranks of a replica hold, as those of norms under tensor parallelism, are merged in a tensor of
    their own, so that all these ranks compute the same bits: int8 scales and some backends' sums depend on an element's
    place in the tensor.

    A replica's weight is the (weighted) number of tokens since the last merge: tokens, (fragments,) float64. reducer:
    the replica's gradient reducer, which holds the masters. groups: must contain "outer", the ranks with the same
    coordinates in each replica. replica: the number of this rank's replica. equal_fragments: those that the last step's
    merge made equal in all replicas; gossip does so after the last step only. unmerged: the fragments that a failed
    merge has left to merge. A fragment is written only when all its communication is done: a merge that fails leaves it
    as it was.
    """

    def __init__(self, config: Config, reducer: GradientReducer, groups: Groups):
        self._config = config.consistency
        self._num_steps = config.train.steps
        self._seed = config.train.seed
        self._group = groups["outer"]
        self._masters = reducer.masters
        self._control_device = groups.world.control_device
        tensors = reducer.checkpoint_tensors()
        count = self._config.fragments
        by_holders: list[dict[tuple[int, ...], dict[str, Tensor]]] = [{} for _ in range(count)]  # by fragment
        for name, spec in reducer.master_specs.items():
            by_holders[self._config.fragment_of(name)].setdefault(spec.replicas, {})[name] = tensors[name]
        self._fragments = [
            [_MergedTensors(masters, self._config) for masters in of_fragment.values()] for of_fragment in by_holders
        ]
        self.replica = self._group.rank
        self.tokens = torch.zeros(count, dtype=torch.float64)
        self._stop_requested = self._regroup_requested = False
        self.equal_fragments: frozenset[int] = frozenset()
        self.unmerged: list[int] = []

    def outer_states(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield DiLoCo's states, equal in all replicas: ("outer.start" or "outer.velocity", parameter name, tensor)."""
        for merged in self._all_merged():
            for kind, flat in (("outer.start", merged.start), ("outer.velocity", merged.velocity)):
                if flat is not None:
                    yield from ((kind, name, part) for name, part in merged.parts(flat))

    def quantization_errors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what this replica has not sent yet, by parameter name; nothing without `consistency.exchange` int8."""
        for merged in self._all_merged():
            if merged.error is not None:
                yield from merged.parts(merged.error)

    def forget_progress(self) -> None:
        """Forget tokens and quantization errors since the last merge: another replica sends them."""
        for tensor in (self.tokens, *(error for _, error in self.quantization_errors())):
            tensor.zero_()

    def _all_merged(self) -> Iterator[_MergedTensors]:
        return itertools.chain.from_iterable(self._fragments)

    def is_equal(self, name: str) -> bool:
        """Return whether the last step's merge made this parameter equal in all replicas."""
        return self._config.fragment_of(name) in self.equal_fragments

    @property
    def num_different_models(self) -> int:
        """Number of models that the replicas hold now: 1 if the last step's merge has made all of them equal."""
        return 1 if len(self.equal_fragments) == len(self._fragments) else self._group.size

    def count_step(self, result: Result) -> None:
        """Count the tokens of a step of this replica, and what its ranks ask for, until the next merge."""
        self.tokens += result.num_tokens if result.update_successful else 0.0
        self._stop_requested |= result.stop_requested
        self._regroup_requested |= result.regroup_requested

    def merge_if_due(
        self, step: int, result: Result, optimizer_states: Mapping[Tensor, Mapping[str, Tensor]]
    ) -> tuple[Result, bool]:
        """Collective over the replicas: merge the fragments of their masters that are due after step `step` (from 0).

        result: of this replica's step. optimizer_states: of each master. Returns (result, merged). The replicas agree
        when they merge, and only then: the returned result then says whether any of them was asked to stop or to
        regroup (to let ranks join or leave) since the last merge, and whether all have written their checkpoint files;
        between merges these three flags are False. merged: whether masters changed, so that the caller must update the
        parameters.
        """
        self.unmerged = self.due_fragments(step)
        if not self.unmerged:
            self.equal_fragments = frozenset()
            return replace(result, stop_requested=False, regroup_requested=False, checkpoint_written=False), False
        return self.merge_rest(step, result, optimizer_states)

    def merge_rest(
        self, step: int, result: Result, optimizer_states: Mapping[Tensor, Mapping[str, Tensor]]
    ) -> tuple[Result, bool]:
        """Collective over the replicas: merge the fragments `unmerged`. Arguments and result as of `merge_if_due`."""
        due = list(self.unmerged)
        self.equal_fragments = frozenset()
        weights = torch.zeros(self._group.size, len(due), dtype=torch.float64)
        weights[self.replica] = self.tokens[due]
        flags = self._stop_requested, self._regroup_requested, result.checkpoint_written
        values = torch.cat([weights.flatten(), torch.tensor(flags, dtype=torch.float64)]).to(self._control_device)
        all_reduce(values, self._group, async_op=True).wait(host=True)
        *all_weights, stops, regroups, written = values.tolist()
        weights_by_fragment = [all_weights[at :: len(due)] for at in range(len(due))]
        totals = [sum(weights) for weights in weights_by_fragment]
        self._stop_requested = self._regroup_requested = False
        for fragment, weights, total in zip(due, weights_by_fragment, totals, strict=True):
            if total > 0:
                self._merge_fragment(fragment, step, weights, optimizer_states)
            self.tokens[fragment] = 0
            self.unmerged.remove(fragment)
        if self._config.mode != "gossip":  # a fragment that nobody has trained is still equal from the merge before
            self.equal_fragments = frozenset(due)
        elif step + 1 == self._num_steps:
            self.equal_fragments = frozenset(at for at, total in zip(due, totals, strict=True) if total > 0)
        all_written = written == self._group.size
        agreed = replace(
            result, stop_requested=stops > 0, regroup_requested=regroups > 0, checkpoint_written=all_written
        )
        return agreed, max(totals) > 0

    def due_fragments(self, step: int) -> list[int]:
        """Return the indices of the fragments of the model that the replicas merge after step `step` (from 0)."""
        return [fragment for fragment in range(len(self._fragments)) if self._is_due(fragment, step)]

    def _is_due(self, fragment: int, step: int) -> bool:
        """Whether a fragment is merged after a step: every h steps, and all of them after the last."""
        h = self._config.h
        ahead = fragment * self._config.h // len(self._fragments)
        return (step + 1 + ahead) % h == 0 or step + 1 == self._num_steps

    @torch.no_grad()
    def _merge_fragment(
        self,
        fragment: int,
        step: int,
        weights: Sequence[float],
        optimizer_states: Mapping[Tensor, Mapping[str, Tensor]],
    ) -> None:
        """Collective: merge a fragment. weights: of each replica, not all 0. Changes nothing if communication fails."""
        received = [(merged, *self._exchange(merged, step, weights)) for merged in self._fragments[fragment]]
        for merged, flat, error in received:
            if error is not None:
                merged.error.copy_(error)
            if merged.start is not None:
                lr, momentum = self._config.outer_lr, self._config.outer_momentum
                merged.velocity.mul_(momentum).add_(flat)
                flat = merged.start.sub_(flat.add_(merged.velocity, alpha=momentum), alpha=lr)
            for name, part in merged.parts(flat):
                merged.masters[name].copy_(part)
            for name in merged.masters if self._config.reset_moments else ():
                for state in optimizer_states.get(self._masters.get(name), {}).values():
                    state.zero_()

    def _exchange(self, merged: _MergedTensors, step: int, weights: Sequence[float]) -> tuple[Tensor, Tensor | None]:
        """Collective: return the merged values of some tensors, under DiLoCo the outer gradient, and their new error.

        The error is that of quantization; None without it.
        """
        share = weights[self.replica] / sum(weights)
        flat = _flatten(merged.masters)
        if self._config.mode == "gossip" and step + 1 < self._num_steps:
            fractions = mixing_fractions(self.replica, weights, lambda replica: self._neighbours(step, replica))
            return mix_with_neighbours(flat, fractions, self._neighbours(step, self.replica), self._group), None
        error = None if merged.error is None else merged.error.clone()
        return self._average(flat if merged.start is None else merged.start - flat, share, error), error

    def _average(self, flat: Tensor, share: float, error: Tensor | None) -> Tensor:
        """Average over the replicas in place. A replica without tokens does not count, even if it is not finite.

        error: of what this replica has sent before, see `all_reduce_int8`; None sends full precision.
        """
        flat = flat.mul_(share) if share else flat.zero_()
        if error is None:
            all_reduce(flat, self._group)
        else:
            all_reduce_int8(flat, error, self._group)
        return flat

    def _neighbours(self, step: int, replica: int) -> list[int]:
        """The replicas with which `replica` exchanges parameters after a step."""
        size = self._group.size
        at = replica
        if self._config.topology == "ring":
            return sorted({(at - 1) % size, (at + 1) % size} - {at})
        order = sorted(range(size), key=lambda replica: int(hash64(self._seed, step, replica)))  # random pairs
        partner = order.index(at) ^ 1
        return [order[partner]] if partner < size else []


def _flatten(masters: Mapping[str, Tensor]) -> Tensor:
    """Copy this rank's elements of masters into one tensor, of at least float32."""
    tensors = [master.detach().reshape(-1) for master in masters.values()]
    return torch.cat([tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors])


def mixing_fractions(
    replica: int, weights: Sequence[float], neighbours_of: Callable[[int], list[int]]
) -> dict[int, float]:
    """Return the fraction with which each replica's values enter `replica` in a merge of gossip; they sum to 1.

    weights: w_i >= 0 of each replica. neighbours_of: returns the replicas that a replica exchanges values with. With
    S_i, the sum of the weights of replica i and its neighbours, the fraction from neighbour j is w_j / max(S_i, S_j),
    and replica i keeps the rest. What i gives to j, times w_j, then equals what j gives to i, times w_i, so a merge
    leaves sum_i w_i theta_i unchanged, and repeated merges converge to the weighted mean (Metropolis-Hastings weights).
    With w_j / S_i, a plain average over the neighbours, they would converge to another mean. A replica of weight 0
    gives nothing, and takes the weighted mean of its neighbours.
    """
    own, neighbours = weights[replica], neighbours_of(replica)

    def sum_around(at: int) -> float:
        return weights[at] + sum(weights[near] for near in neighbours_of(at))

    around = sum_around(replica)
    if not around:
        return {replica: 1.0}
    # The sum of a replica of weight 0 is unchanged whatever it takes.
    fractions = {
        near: weights[near] / (max(around, sum_around(near)) if own else around)
        for near in neighbours
        if weights[near] > 0
    }
    # 1 minus the others' fractions, in a form that is exactly w_i / S_i, the plain average, where all sums are equal.
    rest = own / around + sum(weights[near] / around - fraction for near, fraction in fractions.items())
    return fractions | ({replica: rest} if own else {})


def mix_with_neighbours(flat: Tensor, fractions: Mapping[int, float], neighbours: list[int], group: Group) -> Tensor:
    """Collective: return the sum over this rank and its neighbours of their `flat` (n,), times `fractions`.

    neighbours: group ranks; this rank sends `flat` to all of them. fractions: by group rank; one that is absent does
    not count, even if its values are not finite.
    """
    arriving = {rank: torch.empty_like(flat) for rank in neighbours}
    transfers = [P2POp("send", flat, rank) for rank in neighbours]
    transfers += [P2POp("recv", tensor, rank) for rank, tensor in arriving.items()]
    batch_send_recv(transfers, group)
    by_rank = arriving | {group.rank: flat}
    return sum(by_rank[rank] * fractions[rank] for rank in sorted(fractions))
