"""Bytes of gradients, and of ZeRO's temporary buffers, at each place of a step.

ZeRO stage 3 gathers a layer's parameters while it computes and prefetches those of the next; the last layer of forward
stays gathered. In stages 2 and 3 gradients wait until all of a flat gradient are ready; it is then filled and reduced
to the shard that stays. At most two flat gradients are in flight, one while another is being filled.
"""

from collections.abc import Sequence, Set

from minidist.precision.policy import PRECISION_BYTES
from minidist.process_groups import is_hidden_matrix
from minidist.tools.estimate import shards, states
from minidist.tools.estimate.layout import Layout
from minidist.tools.estimate.shards import Row
from minidist.zero.plan import ROOT

# A place in backward is a layer's number or one of these: head and final norm, embedding, end of backward.
HEAD, EMBEDDING, DONE = "head", "embedding", "done"
MAX_IN_FLIGHT = 2  # flat gradients


class TemporaryBuffers:
    """The gradients and temporary buffers of a rank.

    flat_groups: its flat parameter groups in the order of backward; gradient_bytes: the gradients that persist;
    several: whether a step has more than one micro-batch.
    """

    def __init__(self, layout: Layout, stage: int, flat_groups: Sequence[Row], gradient_bytes: int, several: bool):
        self.layout, self.stage, self.flat_groups = layout, stage, flat_groups
        self.gradient_bytes, self.several = gradient_bytes, several
        self.zero, self.policy = layout.config.zero, layout.policy
        self.grad_size, self.wire_size = (
            PRECISION_BYTES[self.policy.accumulate],
            PRECISION_BYTES[self.policy.reduce],
        )  # per element
        self._weights = {weight.name: weight for weight in states.weights(layout, stage)}

    # -- parameters ---------------------------------------------------------------------------------------------------

    def gathered_parameter_bytes(
        self, chunk: int, place: int | str, forward: bool = False, prefetching: bool = True
    ) -> int:
        """Bytes of stage 3's gathered flat parameters. prefetching: whether the next all-gather is in flight."""
        if self.zero.stage < 3:
            return 0
        part = self.layout.chunks(self.stage)[chunk]
        last = part.layers[-1:] if self.zero.prefetch or self.zero.keep_last_block else ()
        if forward:
            last = last if part.last and self.zero.keep_last_block else ()
        blocks = {HEAD: last, EMBEDDING: part.layers[:1], DONE: part.layers[:1]}.get(place)
        if blocks is None:
            blocks = [i for i in (place, place - (self.zero.prefetch and prefetching)) if i in part.layers]
        gathered = {*blocks, *([ROOT] if part.first or part.last else [])}
        numel = sum(group.layout.numel for group in self.flat_groups if group.block in gathered)
        return numel * PRECISION_BYTES[self.policy.parameter]

    # -- gradients ----------------------------------------------------------------------------------------------------

    def gradient_bytes_before_backward(self) -> int:
        """Bytes of the gradients that exist before a backward, the last of the step if there are several."""
        return 0 if self._allocated_in_backward and not self.several else self.gradient_bytes

    def gradient_and_buffer_bytes(
        self, chunk: int, place: int | str, ready: int, split: bool = False
    ) -> tuple[int, int]:
        """(gradients, buffers) once `ready` gradients of the module at `place` are computed. Buffers are gradients that
        wait for others of their flat gradient, and flat gradients in flight.

        split: gradients of matrices are computed after this backward.
        """
        names = self._ready_gradients(chunk, place, ready)
        if split:
            names = {name for name in names if self._weights[name].dimensions < 2 or name == states.FIRST[0][0]}
        if not shards.apart(self.layout):
            made = sum(self._weights[name].numel for name in names) * self.grad_size
            return (made if self._allocated_in_backward and not self.several else self.gradient_bytes), 0
        launched = self.launched_reductions(chunk, place, ready)
        if not self.zero.shares_gradients:
            sent = [self._send_bytes(group) for group in launched if self.zero.stage]
            return self.gradient_bytes, sum(sent) if self.wire_size != self.grad_size else 0
        buffers = self._waiting_bytes(names, launched) + self._in_flight_bytes(chunk, launched, MAX_IN_FLIGHT)
        return self._shard_bytes(launched), buffers

    def bytes_while_filling(self, chunk: int, number: int, place: int | str, ready: int) -> tuple[int, int]:
        """(gradients, buffers) while the chunk's flat gradient `number` is filled and then sent."""
        before = self._groups_of(chunk)[:number]
        group, names = self._groups_of(chunk)[number], self._ready_gradients(chunk, place, ready)
        full, shard = group.layout.numel * self.grad_size, group.layout.shard * self.grad_size
        waiting = self._waiting_bytes(names, [*before, group])
        copied = self._waiting_bytes(names & group.layout.slots.keys(), [])
        wire_copies = self._send_bytes(group) if self.wire_size != self.grad_size else 0
        buffers = full + waiting + max(copied, shard * self.several + wire_copies)
        return self._shard_bytes(before), buffers + self._in_flight_bytes(chunk, before, MAX_IN_FLIGHT - 1)

    def launched_reductions(self, chunk: int, place: int | str, ready: int) -> list[Row]:
        """The flat groups whose reduction has been launched: all their gradients are ready; in stage 3, backward has
        left their layer; in stages 2 and 3 under a pipeline, the backward of the chunk has ended."""
        groups, names = self._groups_of(chunk), self._ready_gradients(chunk, place, ready)
        if place == DONE:
            return groups
        if self.layout.mesh.pp > 1 and self.zero.shares_gradients:
            return []
        if self.zero.stage == 3:
            first_layer = self.layout.chunks(self.stage)[chunk].layers[0]
            current = {HEAD: len(self._weights), EMBEDDING: first_layer}.get(place, place)
            return [group for group in groups if group.block > current]
        found = []
        for group in groups:
            if not group.layout.slots.keys() <= names:
                break
            found.append(group)
        return found

    def _groups_of(self, chunk: int) -> list[Row]:
        return [group for group in self.flat_groups if group.chunk == chunk]

    def _shard_bytes(self, launched: Sequence[Row]) -> int:
        return self.gradient_bytes if self.several else sum(group.layout.shard for group in launched) * self.grad_size

    def _waiting_bytes(self, ready: Set[str], launched: Sequence[Row]) -> int:
        """Bytes of the gradients that autograd has computed and no launched reduction has copied."""
        names = ready.difference(*(group.layout.slots for group in launched))
        return sum(self._weights[name].numel for name in names) * PRECISION_BYTES[self.policy.parameter]

    def _in_flight_bytes(self, chunk: int, launched: Sequence[Row], limit: int) -> int:
        """Bytes of the last `limit` launched flat gradients and of their shards; 0 for a group of one rank."""
        if self.layout.config.zero.shard_group_size(self.layout.mesh) == 1:
            return 0
        earlier = self._groups_of(chunk) if self.several else []  # of the previous micro-batch
        groups = [*earlier, *launched][-limit:]
        return sum(self._send_bytes(group) + self.several * group.layout.shard * self.grad_size for group in groups)

    def _send_bytes(self, group: Row) -> int:
        """Bytes of a flat gradient in flight: itself, or its copy and its result in the dtype of the reduction. A group
        of one rank sends nothing."""
        full = group.layout.numel if self.layout.config.zero.shard_group_size(self.layout.mesh) > 1 else 0
        if self.wire_size == self.grad_size:
            return full * self.grad_size
        return (full + group.layout.shard) * self.wire_size

    @property
    def _allocated_in_backward(self) -> bool:
        if shards.apart(self.layout):
            return self.zero.shares_gradients
        return self.layout.config.comm.gradients == "naive"

    def _ready_gradients(self, chunk: int, place: int | str, ready: int) -> set[str]:
        """The names of the chunk's parameters whose gradients are computed."""
        part = self.layout.chunks(self.stage)[chunk]
        if place == DONE:
            return {name for group in self._groups_of(chunk) for name in group.layout.slots}
        found = [name for name, _, _ in reversed(states.LAST) if name in self._weights] if part.last else []
        if place == HEAD:
            return set(found[:ready])
        for index in reversed(part.layers):
            names = [f"model.layers.{index}.{name}" for name, _, _ in reversed(states.LAYER)]
            if index == place:
                return {*found, *names[:ready]}
            found += names
        return {*found, *([states.FIRST[0][0]] if ready and part.first else [])}

    # -- after backward -----------------------------------------------------------------------------------------------

    def wire_copies_after_backward(self) -> int:
        """Bytes of flat gradients still in flight, in the dtype of the reduction, when backward has ended."""
        copied = self.zero.stage > 0 and self.wire_size != self.grad_size and not self.zero.shares_gradients
        return sum(map(self._send_bytes, self.flat_groups)) * copied

    def optimizer_temporary_bytes(self) -> int:
        """Bytes that the update allocates: copies of one shard after another where gradients or masters have another
        dtype, and for Muon's orthogonalisation six tensors of a matrix's size and a square one. Where matrices are
        sharded, also about four copies of this rank's shards: what it sends and receives, both ways."""
        policy, master_size = self.policy, PRECISION_BYTES[self.policy.master or self.policy.state]
        no_masters = policy.master is None and master_size != PRECISION_BYTES[policy.parameter]
        copies = (master_size != self.grad_size) + no_masters
        largest = max((group.layout.shard for group in self.flat_groups), default=0) * master_size * copies
        if self.layout.config.optim.kind != "muon":
            return largest
        hidden, weights = self.layout.config.model.hidden_size, self._weights.values()
        sizes = [weight.numel for weight in weights if is_hidden_matrix(weight.name, weight.dimensions)]
        tensor, shard_ranks = self.layout.mesh.tp, self.layout.config.zero.shard_group_size(self.layout.mesh)
        full = [numel * tensor for numel in sizes]
        muon = max((6 * numel + min(hidden, numel // hidden) ** 2 for numel in full), default=0)
        muon += 4 * -(-sum(sizes) // shard_ranks) if tensor * shard_ranks > 1 else 0
        return largest + muon * master_size
