"""The training state in the memory of the ranks: copies of it, and loading it from there after a failure.

A rank holds boxes of global tensors (`shards`) at some step: its live tensors, copies of them in host memory, and
copies of the shards of a partner in another failure domain (Gemini: Wang et al. 2023). `load_from_memory` loads them as
a checkpoint is loaded, with messages instead of files: it finds the newest step of which the ranks together hold every
element, and each rank gets the boxes that overlap its own. Communication comes as functions, so that this module does
not import `comm`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from minidist.checkpoint.shards import SavedPart, SavedTensor, TensorShard, check_covered, plan_reads
from minidist.errors import RunError
from minidist.fault.collective_errors import GatherObjects
from minidist.parameters import Box
from minidist.tensor_bytes import tensor_bytes

# Sends a byte tensor to every rank and receives one of the given size from every rank, in rank order.
ExchangeBytes = Callable[[Sequence[Tensor], Sequence[int]], list[Tensor]]
# Sends a byte tensor to a rank and receives one of the given size from a rank: (tensor, destination, size, source).
SendReceiveBytes = Callable[[Tensor, int, int, int], Tensor]

_BATCH_BYTES = 256 * 2**20  # of the messages of one exchange, over all ranks


@dataclass(frozen=True)
class InMemoryState:
    """Shards of the training state at one step, in the memory of a process.

    step: number of completed steps. generation: the number of the generation (see `Membership`) whose sharding they
    have; two shards of one step and generation are equal or do not overlap. origin: what this process holds them as:
    "live tensors" of training, "own copies" (earlier copies of its own shards) or "partner copies" (copies of the
    shards of another process). state: the rest of the training state (position in the data, loss scale). shards: boxes
    (index ranges in each dimension) of global tensors.
    """

    step: int
    generation: int
    origin: str
    state: dict
    shards: list[TensorShard] = field(repr=False)

    @property
    def version(self) -> tuple[int, int]:
        """The tuple (step, generation), which is larger for the newer of two states."""
        return self.step, self.generation


@dataclass(frozen=True)
class LoadedState:
    """A training state that `load_from_memory` has loaded.

    step: number of completed steps. states: the field `state` of every `InMemoryState` of that step and generation, of
    all ranks. sources: {`InMemoryState.origin`: the ranks from whose memory tensors of that origin were read}.
    """

    step: int
    states: list[dict]
    sources: dict[str, list[int]]


def load_from_memory(
    held: Sequence[InMemoryState],
    make_local_shards: Callable[[Mapping[str, SavedTensor]], list[TensorShard]],
    required_names: Iterable[str],
    all_gather_object: GatherObjects,
    exchange_bytes: ExchangeBytes,
    rank: int,
) -> LoadedState | None:
    """Collective: load the newest training state that the ranks together hold completely in memory.

    Returns None if there is none. held: the states that this rank holds, the preferred first. make_local_shards:
    returns this rank's shards, to be filled in place, given the descriptions of all tensors of the state.
    required_names: the tensors that this rank needs in any case. all_gather_object: returns the value of every rank.
    exchange_bytes: an all-to-all of byte tensors (`ExchangeBytes`). rank: this rank.
    """
    described = [(one.version, one.origin, one.state, _describe_shards(one.shards)) for one in held]
    gathered = all_gather_object((described, set(required_names)))
    holders = [states for states, _ in gathered]
    needed = set().union(*(names for _, names in gathered))
    for version in sorted({state[0] for states in holders for state in states}, reverse=True):
        tensors = _find_sources(holders, version, rank)
        if tensors is None or needed - tensors.keys():
            continue
        local_shards = make_local_shards(tensors)
        reads, problems = plan_reads(tensors, local_shards)
        if problems:
            raise RunError(f"recovery from memory failed: {'; '.join(problems[:4])}.")
        own = {
            (_source_name(rank, index), shard.name, shard.box): shard.tensor
            for index, one in enumerate(held)
            for shard in one.shards
        }
        _fill_shards(reads, own, all_gather_object, exchange_bytes, rank)
        used = all_gather_object({tuple(map(int, source.split())) for source in reads})
        sources: dict[str, list[int]] = {}
        for source, index in sorted(set().union(*used)):
            sources.setdefault(holders[source][index][1], []).append(source)
        return LoadedState(version[0], [one[2] for states in holders for one in states if one[0] == version], sources)
    return None


def _describe_shards(shards: Iterable[TensorShard]) -> list[tuple[str, str, tuple[int, ...], Box]]:
    """Return the name, dtype name, global shape and box of each shard that is not empty."""
    return [(shard.name, shard.dtype_name, shard.shape, shard.box) for shard in shards if shard.box.numel]


def _source_name(rank: int, index: int) -> str:
    """Return the name of the state number `index` of a rank; it stands where a checkpoint names a file."""
    return f"{rank} {index}"


def _find_sources(holders: Sequence[list], version: tuple[int, int], rank: int) -> dict[str, SavedTensor] | None:
    """Describe the tensors of a version, with one source for each box; None if elements are missing.

    The `file` of a part is the name of its source (`_source_name`). This rank itself is preferred, then live tensors,
    then the ranks after this one: so that the ranks do not all read from the same.
    """
    sources: dict[tuple[str, Box], tuple[tuple, str]] = {}
    facts: dict[str, tuple[str, tuple[int, ...]]] = {}
    for source, states in enumerate(holders):
        for index, (held_version, _, _, described) in enumerate(states):
            if held_version != version:
                continue
            preference = (source != rank, index, (source - rank) % len(holders))
            for name, dtype_name, shape, box in described:
                facts[name] = dtype_name, shape
                known = sources.get((name, box))
                if known is None or preference < known[0]:
                    sources[name, box] = preference, _source_name(source, index)
    parts: dict[str, list[SavedPart]] = {name: [] for name in facts}
    for (name, box), (_, source_name) in sources.items():
        parts[name].append(SavedPart(box.start, box.stop, source_name))
    tensors = {name: SavedTensor(*facts[name], tuple(parts[name])) for name in facts}
    try:
        for name, tensor in tensors.items():
            check_covered(name, tensor)
    except ValueError:
        return None
    return tensors


def _fill_shards(
    reads: dict[str, list],
    own: dict[tuple[str, str, Box], Tensor],
    all_gather_object: GatherObjects,
    exchange: ExchangeBytes,
    rank: int,
) -> None:
    """Collective: fill the shards of `reads` from the memory of the ranks, in batches of bounded size.

    own: the tensors that this rank holds, by source, name and box.
    """
    wanted = [(int(source.split()[0]), *read) for source, of_source in reads.items() for read in of_source]
    wanted.sort(key=lambda read: (read[1].name, read[3].start))
    requests = all_gather_object(
        [
            (source, (saved.file, shard.name, saved.box), box.slices_in(saved.box), shard.name, _box_bytes(shard, box))
            for source, shard, saved, box in wanted
        ]
    )
    for names in _divide_into_batches(requests):
        to_send, incoming = [], [[] for _ in requests]
        for other in range(len(requests)):
            parts = [own[key][at] for source, key, at, name, _ in requests[other] if source == rank and name in names]
            to_send.append(_join_bytes(parts))
        for read in wanted:
            if read[1].name in names:
                incoming[read[0]].append(read)
        sizes = [sum(_box_bytes(shard, box) for _, shard, _, box in parts) for parts in incoming]
        for received, parts in zip(exchange(to_send, sizes), incoming, strict=True):
            start = 0
            for _, shard, _, box in parts:
                stop = start + _box_bytes(shard, box)
                values = received[start:stop].clone().view(shard.tensor.dtype).view(box.shape)  # aligned by the clone
                shard.tensor.detach()[box.slices_in(shard.box)].copy_(values)
                start = stop


def _divide_into_batches(requests: Sequence[list]) -> list[set[str]]:
    """Divide the names of all requested tensors into batches, in the same way on all ranks."""
    sizes: dict[str, int] = {}
    for _, _, _, name, num_bytes in (request for of_rank in requests for request in of_rank):
        sizes[name] = sizes.get(name, 0) + num_bytes
    batches, filled = [set()], 0
    for name in sorted(sizes):
        if filled and filled + sizes[name] > _BATCH_BYTES:
            batches.append(set())
            filled = 0
        batches[-1].add(name)
        filled += sizes[name]
    return batches


def _box_bytes(shard: TensorShard, box: Box) -> int:
    """Return the bytes of a box in the dtype of the shard."""
    return box.numel * shard.tensor.element_size()


def _join_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of all tensors, one after another, in host memory: (bytes,) uint8."""
    parts = [tensor_bytes(tensor.cpu()) for tensor in tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


# -- copies -----------------------------------------------------------------------------------------------------------


def _choose_partner_shift(nodes: Sequence[int], replicas: Sequence[int]) -> int:
    """Choose s, 1 <= s < number of ranks: rank r sends its copy to rank (r + s) modulo the number of ranks.

    nodes, replicas: of each rank, its node and its model replica (dp coordinate). As many ranks as possible have their
    copy on another node, and of the shifts that are equal in this as many as possible in another replica: the ranks of
    one node, or of one replica, may die together.
    """
    size = len(nodes)

    def num_together(shift: int) -> tuple[int, int]:
        pairs = [(rank, (rank + shift) % size) for rank in range(size)]
        return sum(nodes[a] == nodes[b] for a, b in pairs), sum(replicas[a] == replicas[b] for a, b in pairs)

    return min(range(1, size), key=num_together)


class MemoryCopies:
    """Keeps copies of a rank's shards of the training state, and of a partner rank's shards, in host memory.

    Two versions of the copies are kept: while one is overwritten, the other stays complete on all ranks. Shards that
    ranks of two failure domains have anyway (plain data parallelism) are not copied: the live tensors of the other
    replica are the newest copy there can be.

    generation: number of the present generation (see `Membership`). nodes, replicas: the node and the model replica of
    each rank; the partner is on another node or in another replica if possible. all_gather_object: returns the value of
    every rank. send_receive: exchanges bytes with the partners (`SendReceiveBytes`). rank: this rank.
    """

    def __init__(
        self,
        generation: int,
        nodes: Sequence[int],
        replicas: Sequence[int],
        all_gather_object: GatherObjects,
        send_receive: SendReceiveBytes,
        rank: int,
    ):
        self._generation, self._all_gather_object, self._send_receive = generation, all_gather_object, send_receive
        self._rank, self._size = rank, len(nodes)
        self._domains = list(nodes) if len(set(nodes)) > 1 else list(replicas) if len(set(replicas)) > 1 else None
        self._shift = _choose_partner_shift(nodes, replicas) if self._size > 1 else 0
        self._held: list[list[InMemoryState]] = [[], []]
        self._described: list[list[tuple]] = []

    @property
    def complete_states(self) -> list[InMemoryState]:
        """The complete copies on this rank, of its own and of the partner's shards, the newest first."""
        return sorted((one for held in self._held for one in held), key=lambda one: one.version, reverse=True)

    def refresh(self, step: int, shards: Iterable[TensorShard], state: dict) -> None:
        """Collective: copy this rank's shards at `step` into host memory, and exchange the copies with partners.

        The older of the two versions is overwritten. Does nothing if no shard needs a copy. state: the rest of the
        training state, such as the position in the data and the loss scale.
        """
        shards = list(shards)
        mine = [(shard.name, shard.shape, shard.box, shard.tensor.dtype) for shard in shards]
        known = self._described and self._described[self._rank] == mine
        changes = self._all_gather_object(None if known else mine)
        if any(changes):
            old = self._described or [[]] * self._size
            self._described = [new or before for new, before in zip(changes, old, strict=True)]
        exposed = self._find_exposed_boxes()
        if not exposed:
            return
        self._held.reverse()  # the older one is overwritten
        self._held[0] = []
        partner = (self._rank - self._shift) % self._size
        own = [replace(shard, tensor=shard.tensor.detach().to("cpu", copy=True)) for shard in shards]
        to_send = _join_bytes([shard.tensor for shard in own if (shard.name, shard.box) in exposed])
        expected = [one for one in self._described[partner] if (one[0], one[2]) in exposed]
        size = sum(box.numel * dtype.itemsize for _, _, box, dtype in expected)
        received = self._send_receive(to_send, (self._rank + self._shift) % self._size, size, partner)
        self._held[0] = [
            InMemoryState(step, self._generation, "own copies", state, own),
            InMemoryState(step, self._generation, "partner copies", state, _cut_into_shards(received, expected)),
        ]

    def _find_exposed_boxes(self) -> set[tuple[str, Box]]:
        """Return the boxes that the ranks of one failure domain alone hold: their death would lose them."""
        domains: dict[tuple[str, Box], set[int]] = {}
        for rank, described in enumerate(self._described):
            for name, _, box, _ in described:
                domains.setdefault((name, box), set()).add(self._domains[rank] if self._domains else rank)
        return {at for at, found in domains.items() if len(found) == 1 and at[1].numel} if self._size > 1 else set()


def _cut_into_shards(flat: Tensor, described: Sequence[tuple]) -> list[TensorShard]:
    """Cut a byte tensor into shards. described: name, global shape, box and dtype of each."""
    shards, start = [], 0
    for name, shape, box, dtype in described:
        stop = start + box.numel * dtype.itemsize
        shards.append(TensorShard(name, shape, box, flat[start:stop].clone().view(dtype).view(box.shape)))
        start = stop
    return shards
