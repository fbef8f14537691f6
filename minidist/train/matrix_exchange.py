"""Compute with full matrices that are sharded over ranks: two all-to-alls around the computation (Muon)."""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from minidist.comm import Group, all_to_all
from minidist.comm.objects import all_gather_object
from minidist.parameters import Box, ParamSpecs
from minidist.train.matrix_plan import MatrixPlan, MatrixShard, assign_matrix_owners


class ShardedMatrices:
    """Applies a function to full matrices sharded over a group: each matrix is assembled on one rank, its owner.

    The owner applies the function and sends each rank its shard of the result. The constructor is collective.

    matrices: by name, the specs of the matrices of which this rank holds elements; possibly none. group: the ranks over
    which they are sharded. dtype: the shards' dtype; None on a rank that holds no element.
    """

    def __init__(self, matrices: ParamSpecs, group: Group, dtype: torch.dtype | None):
        self.group = group
        of_ranks = all_gather_object(
            (dtype, {name: (spec.shape, spec.boxes) for name, spec in matrices.items()}), group
        )
        everyone = [held for _, held in of_ranks]
        dtype = next((dtype for dtype, _ in of_ranks if dtype is not None), torch.float32)
        self._like = torch.empty(0, dtype=dtype, device=group.world.device)
        self._boxes: list[dict[str, tuple[Box, ...]]] = [
            {name: boxes for name, (_, boxes) in held.items()} for held in everyone
        ]
        self._shapes = {name: shape for held in everyone for name, (shape, _) in held.items()}
        shards = [
            {name: MatrixShard(boxes, sum(box.numel for box in boxes)) for name, boxes in held.items()}
            for held in self._boxes
        ]
        self.plan: MatrixPlan = assign_matrix_owners(shards)
        self._senders = {name: self.plan.sender_ranks(name) for name in self.plan.holders_by_matrix}

    @torch.no_grad()
    def apply(
        self, compute: Callable[[Tensor], Tensor], shards: Mapping[str, Tensor], names: Collection[str]
    ) -> dict[str, Tensor]:
        """Collective: compute on the full matrices in `names`; return this rank's shards of the results, (elements,).

        compute: maps a full matrix (m, n) to (m, n). shards: by name, this rank's elements of each matrix, (elements,):
        its boxes (index ranges, as in the specs) concatenated. names: the same on every rank, including matrices of
        which this rank holds no element.
        """
        group = self.group
        me = self.group.rank
        wanted = [name for name in self.plan.holders_by_matrix if name in names]
        to = {rank: [name for name in wanted if self.plan.owner_by_matrix[name] == rank] for rank in range(group.size)}
        sent = {rank: [shards[n] for n in to[rank] if me in self._senders[n]] for rank in to}
        received = self._all_to_all(
            sent,
            {rank: sum(self._numel(rank, n) for n in to[me] if rank in self._senders[n]) for rank in to},
        )
        back: dict[int, list[Tensor]] = {rank: [] for rank in to}
        at = dict.fromkeys(to, 0)
        for name in to[me]:
            matrix = self._like.new_empty(self._shapes[name])
            for rank in self._senders[name]:
                for box in self._boxes[rank][name]:
                    matrix[box.slices] = received[rank][at[rank] : at[rank] + box.numel].view(box.shape)
                    at[rank] += box.numel
            result = compute(matrix)
            for rank in self.plan.holders_by_matrix[name]:
                back[rank] += [result[box.slices].reshape(-1) for box in self._boxes[rank][name]]
        own = self._boxes[me]
        received = self._all_to_all(back, {rank: sum(self._numel(me, n) for n in to[rank] if n in own) for rank in to})
        results = {}
        for rank, names_of in to.items():
            mine = [name for name in names_of if name in own]
            parts = received[rank].split([self._numel(me, name) for name in mine]) if mine else ()
            results.update(zip(mine, parts, strict=True))
        return results

    def _numel(self, rank: int, name: str) -> int:
        """Return the number of elements of matrix `name` that group rank `rank` holds."""
        shard = self.plan.holders_by_matrix[name].get(rank)
        return 0 if shard is None else shard.numel

    def _all_to_all(self, sent: Mapping[int, list[Tensor]], numel: Mapping[int, int]) -> dict[int, Tensor]:
        """Collective: send each rank its tensors, concatenated; return what each rank sent, (numel[rank],)."""
        parts = [part for rank in range(self.group.size) for part in sent[rank]]
        outgoing = torch.cat(parts).to(self._like.device) if parts else self._like.new_empty(0)
        incoming = self._like.new_empty(sum(numel.values()))
        splits = [sum(part.numel() for part in sent[rank]) for rank in range(self.group.size)]
        lengths = [numel[rank] for rank in range(self.group.size)]
        all_to_all(incoming, outgoing, self.group, lengths, splits, async_op=True).wait()
        return dict(enumerate(incoming.split(lengths)))
