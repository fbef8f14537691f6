"""What each rank sends in a training step, by use: the operations of the step, in the convention of `comm`.

Of a step alone: not the synchronisation at the start, what is said for log lines, evaluation, or checkpoints.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache

from minidist.comm.group_specs import CONTROL
from minidist.comm.wire_bytes import sent_by, sent_elements
from minidist.process_groups import REDUCING, uses
from minidist.tools.estimate import reduction, shards, states
from minidist.tools.estimate.blocks import BETWEEN, TOKENS, WHOLE
from minidist.tools.estimate.compute import repeats_whole
from minidist.tools.estimate.layout import BYTES, Layout, Part
from minidist.tools.estimate.shapes import Sizes

# One operation: its use, its name, the elements the convention table counts, and the bytes of one.
Operation = tuple[str, str, int, int]


class Traffic:
    """What the ranks of a layout send."""

    def __init__(self, layout: Layout):
        self.layout, mesh = layout, layout.mesh
        found = [CONTROL, *uses(mesh, layout.config)]
        self._groups = {use.name: reduction.group_of(mesh, use.partition(mesh)) for use in found}
        # The ranks of a (pp, tp) place reduce the same; those of a stage with equal batches compute the same.
        self._reductions = cache(self._reduce)
        self._rows = cache(self._rows_at)
        self._passes = cache(self._pass)

    def rows(self, rank: int) -> list[shards.Row]:
        """The rows that this rank's parameters lie in; none where each lies by itself."""
        at = self.layout.mesh.coords(rank)
        return self._rows(at["pp"], at["tp"])

    def _rows_at(self, stage: int, tensor: int) -> list[shards.Row]:
        rank = self.layout.mesh.rank(pp=stage, tp=tensor)
        return shards.rows(self.layout, self._groups, rank) if shards.apart(self.layout) else []

    def place(self, rank: int) -> int:
        """Of a rank among those that share out its rows."""
        return self._groups["grads"][rank].index(rank) if self.layout.config.zero.stage else 0

    def group(self, use: str, rank: int) -> Sequence[int]:
        """The ranks that this one talks to for a use, itself among them; none where it has no such use."""
        return self._groups.get(use, {}).get(rank, ())

    def operations(self, rank: int) -> Counter[Operation]:
        """What a rank does in a step, and how often."""
        at = self.layout.mesh.coords(rank)
        passes = self._passes(at["pp"], tuple(self.layout.micro_batches(at["dp"])))
        return self._reductions(at["pp"], at["tp"]) + passes

    def wire_bytes(self, rank: int) -> dict[str, int]:
        """Bytes that a rank sends in a step, by use; a use for which it has nobody to talk to is left out."""
        sent: Counter[str] = Counter()
        for (use, name, elements, each), times in self.operations(rank).items():
            group = self._groups[use][rank]
            if len(group) > 1:
                sent[use] += times * each * self._sent(use, name, elements, len(group), group.index(rank))
        return dict(sent)

    def _sent(self, use: str, name: str, elements: int, size: int, place: int) -> int:
        algorithm = self.layout.config.comm.algorithm
        if use in REDUCING and algorithm != "backend":
            return sent_by(name, algorithm, elements, size, place)
        return sent_elements(name, elements, size, place)

    def _reduce(self, stage: int, tensor: int) -> Counter[Operation]:
        """The count of tokens, the gradients, and the vector by which all ranks decide."""
        rank = self.layout.mesh.rank(pp=stage, tp=tensor)
        double = BYTES["float64"]
        told = 3  # loss, norm, whether to stop; where gradients are in rows, who used each parameter of the model
        if found := self.rows(rank):
            sent = shards.messages(self.layout, found, stage)
            told += states.parameter_tensors(self.layout.config.model)
        else:
            sent = Counter(
                (use, "all_reduce", elements, each)
                for use, elements, each in reduction.messages(self.layout, self._groups, rank)
            )
        return sent + Counter([("loss", "all_reduce", 1, double), ("control", "all_reduce", told, double)])

    def _pass(self, stage: int, micro_batches: tuple[int, ...]) -> Counter[Operation]:
        """Forward and backward of the micro-batches that have samples, through all parts of a stage."""
        operations: Counter[Operation] = Counter()
        for samples in filter(None, micro_batches):
            sizes = Sizes.of(self.layout, samples)
            for chunk, part in enumerate(self.layout.chunks(stage)):
                operations.update(self._tensor(sizes, part))
                for operation in [*self._context(sizes), *self._again(sizes)]:
                    operations[operation] += len(part.layers)
                operations.update(self._transfers(sizes, stage, chunk))
        return operations

    def _tensor(self, sizes: Sizes, part: Part) -> Counter[Operation]:
        """What enters and leaves the operators that tensor ranks share, and their loss."""
        layout = self.layout
        if layout.mesh.tp == 1:
            return Counter()
        # A layer has two such pieces, attention and feed-forward. The embedding only leaves one, the head only enters.
        both, each = 2 * len(part.layers), BYTES[layout.dtype]
        passes = both + both + part.first + part.last
        whole, operations = sizes.numel(WHOLE), Counter()
        if layout.sequence > 1:  # one way gathers, the other scatters, and backward is the reverse
            operations["tensor", "all_gather", whole, each] += passes
            operations["tensor", "reduce_scatter", whole, each] += passes
        else:  # leaving sums in forward, entering in backward
            operations["tensor", "all_reduce", whole, each] += passes
        if part.last:
            tokens, wide = sizes.numel(TOKENS), BYTES[layout.compute_dtype]
            operations["tensor", "all_reduce", tokens, wide] += 1  # the largest logit
            operations["tensor", "all_reduce", 2 * tokens, wide] += 1  # the normalizer, and the logit at the label
        return operations

    def _context(self, sizes: Sizes) -> Iterator[Operation]:
        """Attention of one layer, forward and backward, when ranks share the sequence."""
        layout, cp = self.layout, self.layout.mesh.cp
        if cp == 1:
            return
        each = BYTES[layout.dtype]
        if layout.config.parallel.context == "ring":
            held = 2 * sizes.numel("b kv/tp s/cp d")  # keys and values
            for _ in range(cp - 1):
                yield "context", "send", held, each
                yield "context", "send", held, each
                yield "context", "send", held, BYTES[layout.compute_dtype]  # their gradients, on their way home
            return
        for sent in ("b exchanged s/cp d", "b heads/tp s/cp d"):  # queries, keys and values; what attention gave
            yield "context", "all_to_all", sizes.numel(sent), each
            yield "context", "all_to_all", sizes.numel(sent), each

    def _again(self, sizes: Sizes) -> Iterator[Operation]:
        """What recomputation of one layer sends once more: the messages of its forward."""
        layout, each = self.layout, BYTES[self.layout.dtype]
        how, cp, whole = layout.config.recompute, layout.mesh.cp, sizes.numel(WHOLE)
        if how == "none":
            return
        if cp > 1 and layout.config.parallel.context == "ring":
            for _ in range(cp - 1):
                yield "context", "send", 2 * sizes.numel("b kv/tp s/cp d"), each
        elif cp > 1:
            yield "context", "all_to_all", sizes.numel("b exchanged s/cp d"), each
            if how == "block":  # else all is there when the result would be sent back
                yield "context", "all_to_all", sizes.numel("b heads/tp s/cp d"), each
        if how == "block" and layout.mesh.tp > 1:
            leaving = 1 + repeats_whole(layout.config)
            if layout.sequence > 1:
                yield from 2 * [("tensor", "all_gather", whole, each)]
                yield from leaving * [("tensor", "reduce_scatter", whole, each)]
            else:
                yield from leaving * [("tensor", "all_reduce", whole, each)]

    def _transfers(self, sizes: Sizes, stage: int, chunk: int) -> Counter[Operation]:
        """Between a chunk and the parts before and after it, where another stage has those."""
        schedule, operations = self.layout.schedule, Counter()
        if schedule is None:
            return operations
        position, elements = schedule.position(stage, chunk), sizes.numel(BETWEEN)
        for use, neighbour in (("activations", position + 1), ("gradients", position - 1)):
            if 0 <= neighbour < schedule.positions and schedule.owner(neighbour)[0] != stage:
                operations[use, "send", elements, BYTES[self.layout.dtype]] += 1
        return operations
