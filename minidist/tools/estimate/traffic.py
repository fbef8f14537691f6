"""The collectives and transfers of one training step on each rank, and the bytes they send.

Only the step itself: not the broadcast of initial parameters, log lines, evaluation or checkpoints.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache

from minidist.comm.group_specs import CONTROL
from minidist.comm.wire_bytes import sent_elements, sent_elements_by_algorithm
from minidist.precision.policy import PRECISION_BYTES
from minidist.process_groups import GRADIENT_GROUPS, group_specs, is_hidden_matrix
from minidist.tools.estimate import gradient_reduction, shards, states
from minidist.tools.estimate.flops import recomputes_down_projection
from minidist.tools.estimate.layout import DTYPE_BYTES, Layout, ModelChunk
from minidist.tools.estimate.saved_tensors import HIDDEN, SHARDED_HIDDEN, TOKENS
from minidist.tools.estimate.shapes import Dimensions
from minidist.train.matrix_plan import MatrixPlan, Shard, plan_matrices

# (group spec, operation, elements as `comm/wire_bytes` counts them, bytes per element)
Operation = tuple[str, str, int, int]


class Traffic:
    """The communication of every rank of a layout."""

    def __init__(self, layout: Layout):
        self.layout, mesh = layout, layout.mesh
        specs = [CONTROL, *group_specs(mesh, layout.config)]
        self._groups = {spec.name: gradient_reduction.group_by_rank(spec.rank_groups(mesh)) for spec in specs}
        # Ranks at one (pp, tp) coordinate reduce the same; those of a stage with equal batches compute the same.
        self._reduction_operations = cache(self._list_reductions)
        self._flat_groups = cache(self._find_flat_groups)
        self._model_operations = cache(self._list_model_operations)
        self._matrix_plan = cache(self._plan_matrices)

    def flat_groups(self, rank: int) -> list[shards.Row]:
        """The flat parameter groups of this rank; empty where parameters are not flattened."""
        at = self.layout.mesh.coords(rank)
        return self._flat_groups(at["pp"], at["tp"])

    def _find_flat_groups(self, stage: int, tensor: int) -> list[shards.Row]:
        rank = self.layout.mesh.rank(pp=stage, tp=tensor)
        return shards.rows(self.layout, self._groups, rank) if shards.apart(self.layout) else []

    def shard_index(self, rank: int) -> int:
        """Which ZeRO shard this rank owns."""
        return self._groups["grads"][rank].index(rank) if self.layout.config.zero.stage else 0

    def group_ranks(self, spec: str, rank: int) -> Sequence[int]:
        """The ranks of this rank's process group, itself included; empty where it has no such group."""
        return self._groups.get(spec, {}).get(rank, ())

    def operations(self, rank: int) -> Counter[Operation]:
        """Every operation of a step on this rank, with how often it runs."""
        at = self.layout.mesh.coords(rank)
        model = self._model_operations(at["pp"], tuple(self.layout.micro_batches(at["dp"])))
        return self._reduction_operations(at["pp"], at["tp"]) + model + self._matrix_exchange(rank)

    def wire_bytes(self, rank: int) -> dict[str, int]:
        """Bytes that this rank sends in a step, by group spec; groups of one rank are left out."""
        sent: Counter[str] = Counter()
        for (spec, name, elements, each), times in self.operations(rank).items():
            group = self._groups[spec][rank]
            if len(group) > 1:
                sent[spec] += times * each * self._sent_elements(spec, name, elements, len(group), group.index(rank))
        return dict(sent)

    def _sent_elements(self, spec: str, name: str, elements: int, size: int, group_rank: int) -> int:
        algorithm = self.layout.config.comm.algorithm
        if spec in GRADIENT_GROUPS and algorithm != "backend":
            return sent_elements_by_algorithm(name, algorithm, elements, size, group_rank)
        return sent_elements(name, elements, size, group_rank)

    def _matrix_exchange(self, rank: int) -> Counter[Operation]:
        """What this rank sends around Muon's update: shards to the owners of matrices, updates to their holders."""
        ranks, policy = self.group_ranks("matrices", rank), self.layout.policy
        if len(ranks) < 2:
            return Counter()
        plan = self._matrix_plan(tuple(ranks))
        sent = sum(plan.sent_elements(ranks.index(rank), plan.holders))
        return Counter([("matrices", "send", sent, PRECISION_BYTES[policy.master or policy.state])])

    def _plan_matrices(self, ranks: Sequence[int]) -> MatrixPlan:
        return plan_matrices([self._matrix_shards(rank) for rank in ranks])

    def _matrix_shards(self, rank: int) -> dict[str, Shard]:
        """The elements that a rank holds of each matrix of a layer."""
        layout, at = self.layout, self.layout.mesh.coords(rank)
        weights = {weight.name: weight for weight in states.weights(layout, at["pp"])}
        ranges = {name: (0, weight.numel) for name, weight in weights.items()}
        if shards.apart(layout):
            groups, index = self.flat_groups(rank), self.shard_index(rank)
            ranges = {name: range_ for group in groups for name, range_ in group.layout.held(index).items()}
        replicas = max(1, layout.mesh.tp // layout.config.model.num_kv_heads)  # of a key or value head
        found = {}
        for name, (start, stop) in ranges.items():
            if is_hidden_matrix(name, weights[name].dimensions):
                tensor = at["tp"] // replicas if weights[name].shared == "head" else at["tp"]
                found[name] = Shard((tensor, start, stop), stop - start)
        return found

    def _list_reductions(self, stage: int, tensor: int) -> Counter[Operation]:
        """Gradients, the token count, and the vector on which all ranks agree before the update."""
        rank = self.layout.mesh.rank(pp=stage, tp=tensor)
        double = DTYPE_BYTES["float64"]
        agreed = 3  # loss, norm, whether to stop; with flat gradients also which parameters of the model were used
        if flat_groups := self.flat_groups(rank):
            sent = shards.messages(self.layout, flat_groups, stage)
            agreed += states.parameter_tensors(self.layout.config.model)
        else:
            all_reduces = gradient_reduction.list_gradient_all_reduces(self.layout, self._groups, rank)
            sent = Counter((spec, "all_reduce", elements, each) for spec, elements, each in all_reduces)
        return sent + Counter([("loss", "all_reduce", 1, double), ("control", "all_reduce", agreed, double)])

    def _list_model_operations(self, stage: int, micro_batches: tuple[int, ...]) -> Counter[Operation]:
        """Forward and backward of the micro-batches that have samples, through all chunks of a stage."""
        operations: Counter[Operation] = Counter()
        for samples in filter(None, micro_batches):
            sizes = Dimensions.of(self.layout, samples)
            for number, chunk in enumerate(self.layout.chunks(stage)):
                operations.update(self._tensor_parallel(sizes, chunk))
                for operation in [*self._context_parallel(sizes), *self._recomputation(sizes)]:
                    operations[operation] += len(chunk.layers)
                operations.update(self._pipeline_transfers(sizes, stage, number))
        return operations

    def _tensor_parallel(self, sizes: Dimensions, chunk: ModelChunk) -> Counter[Operation]:
        """Entering and leaving the tensor-parallel regions, and the vocabulary-parallel loss."""
        layout = self.layout
        if layout.mesh.tp == 1:
            return Counter()
        # A layer has two regions, attention and feed-forward. The embedding only leaves one, the head only enters one.
        both, each = 2 * len(chunk.layers), DTYPE_BYTES[layout.dtype]
        times = both + both + chunk.first + chunk.last
        hidden, operations = sizes.numel(HIDDEN), Counter()
        if layout.sequence_parallel_size > 1:  # enter: all-gather, leave: reduce-scatter; backward the reverse
            operations["tensor", "all_gather", hidden, each] += times
            operations["tensor", "reduce_scatter", hidden, each] += times
        else:  # leaving all-reduces in forward, entering in backward
            operations["tensor", "all_reduce", hidden, each] += times
        if chunk.last:
            tokens, compute_bytes = sizes.numel(TOKENS), DTYPE_BYTES[layout.compute_dtype]
            operations["tensor", "all_reduce", tokens, compute_bytes] += 1  # the largest logit
            operations["tensor", "all_reduce", 2 * tokens, compute_bytes] += 1  # softmax denominator, label's logit
        return operations

    def _context_parallel(self, sizes: Dimensions) -> Iterator[Operation]:
        """Attention of one layer, forward and backward."""
        layout, cp = self.layout, self.layout.mesh.cp
        if cp == 1:
            return
        each = DTYPE_BYTES[layout.dtype]
        if layout.config.parallel.context == "ring":
            keys_values = 2 * sizes.numel("b kv/tp s/cp d")
            for _ in range(cp - 1):
                yield "context", "send", keys_values, each
                yield "context", "send", keys_values, each
                yield "context", "send", keys_values, DTYPE_BYTES[layout.compute_dtype]  # their gradients
            return
        for formula in ("b exchanged s/cp d", "b heads/tp s/cp d"):  # queries, keys and values; attention's output
            yield "context", "all_to_all", sizes.numel(formula), each
            yield "context", "all_to_all", sizes.numel(formula), each

    def _recomputation(self, sizes: Dimensions) -> Iterator[Operation]:
        """What recomputing one layer sends a second time."""
        layout, each = self.layout, DTYPE_BYTES[self.layout.dtype]
        how, cp, hidden = layout.config.recompute, layout.mesh.cp, sizes.numel(HIDDEN)
        if how == "none":
            return
        if cp > 1 and layout.config.parallel.context == "ring":
            for _ in range(cp - 1):
                yield "context", "send", 2 * sizes.numel("b kv/tp s/cp d"), each
        elif cp > 1:
            yield "context", "all_to_all", sizes.numel("b exchanged s/cp d"), each
            if how == "block":  # selective recomputation stops before attention's output is sent back
                yield "context", "all_to_all", sizes.numel("b heads/tp s/cp d"), each
        if how == "block" and layout.mesh.tp > 1:
            leaving = 1 + recomputes_down_projection(layout.config)
            if layout.sequence_parallel_size > 1:
                yield from 2 * [("tensor", "all_gather", hidden, each)]
                yield from leaving * [("tensor", "reduce_scatter", hidden, each)]
            else:
                yield from leaving * [("tensor", "all_reduce", hidden, each)]

    def _pipeline_transfers(self, sizes: Dimensions, stage: int, chunk: int) -> Counter[Operation]:
        """Activations to the next chunk and gradients to the previous one, where another stage has them."""
        schedule, operations = self.layout.schedule, Counter()
        if schedule is None:
            return operations
        position, elements = schedule.position(stage, chunk), sizes.numel(SHARDED_HIDDEN)
        for spec, neighbour in (("activations", position + 1), ("gradients", position - 1)):
            if 0 <= neighbour < schedule.positions and schedule.owner(neighbour)[0] != stage:
                operations[spec, "send", elements, DTYPE_BYTES[self.layout.dtype]] += 1
        return operations
