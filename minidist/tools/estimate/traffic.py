"""The collectives and sends of one training step on each rank, and the bytes they send: modelled, not counted.

A transfer is a send from one rank to another. Only the step itself is covered: not the broadcast of initial parameters,
log lines, evaluation or checkpoints. Process groups are named by their group spec (`process_groups`), such as "tensor".
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache

from minidist.comm.group_specs import CONTROL
from minidist.comm.wire_bytes import int8_chunk_bytes, sent_elements
from minidist.precision.policy import PRECISION_BYTES
from minidist.process_groups import group_specs, is_hidden_matrix, ranks_with, replica_dp_coords
from minidist.tools.estimate import gradient_reduction, shards, states
from minidist.tools.estimate.flops import recomputes_down_projection
from minidist.tools.estimate.layout import DTYPE_BYTES, ModelChunk, RunLayout
from minidist.tools.estimate.saved_tensors import HIDDEN, SHARDED_HIDDEN, TOKENS
from minidist.tools.estimate.shapes import Dimensions
from minidist.tools.estimate.shards import LocalFlatParam, Operation
from minidist.tools.estimate.states import LocalParameter
from minidist.train.matrix_plan import MatrixPlan, MatrixShard, assign_matrix_owners


class Traffic:
    """Models the collectives and transfers of one training step on every rank of a layout, and the bytes they send."""

    def __init__(self, layout: RunLayout):
        self.layout, mesh = layout, layout.mesh
        specs = [CONTROL, *group_specs(mesh, layout.config)]
        self._groups = {spec.name: gradient_reduction.map_ranks_to_groups(spec.rank_groups(mesh)) for spec in specs}
        # Ranks at one (pp, tp) coordinate reduce the same; those of a stage with equal batches compute the same.
        self._reduction_operations = cache(self._list_reductions)
        self._flat_params = cache(self._plan_flat_params)
        self._model_operations = cache(self._list_model_operations)
        self._matrix_plan = cache(self._assign_matrix_owners)
        how = layout.config.consistency
        self._control = "replica" if how.merges_replicas or how.is_asynchronous else "control"

    def flat_params(self, rank: int) -> list[LocalFlatParam]:
        """Return the flat parameters of global rank `rank`, in the order in which backward completes their gradients.

        [] where parameters are not flattened: ZeRO stage 0 with one dtype for all kinds of tensors.
        """
        coords = self.layout.mesh.coords(rank)
        return self._flat_params(coords["pp"], coords["tp"])

    def _plan_flat_params(self, stage: int, tensor: int) -> list[LocalFlatParam]:
        """Return the flat parameters of the ranks with these coordinates; [] where parameters are not flattened.

        stage, tensor: the coordinates pp and tp.
        """
        rank = self.layout.mesh.rank(pp=stage, tp=tensor)
        if not shards.uses_flat_params(self.layout):
            return []
        return shards.plan_local_flat_params(self.layout, self._groups, rank)

    def shard_index(self, rank: int) -> int:
        """Return the index of the ZeRO shard that global rank `rank` owns; 0 without ZeRO."""
        return self._groups["grads"][rank].index(rank) if self.layout.config.zero.stage else 0

    def group_ranks(self, spec: str, rank: int) -> Sequence[int]:
        """Return the global ranks of the process group that contains `rank`, in group order; empty if there is none.

        spec: the name of a group spec (the declaration of process groups for one purpose, such as "tensor").
        """
        return self._groups.get(spec, {}).get(rank, ())

    def operations(self, rank: int) -> Counter[Operation]:
        """Return how often `rank` runs each collective and each send in one step.

        The keys are `Operation`: (group spec, operation, elements, bytes per element).
        """
        coords = self.layout.mesh.coords(rank)
        model = self._model_operations(coords["pp"], tuple(self.layout.micro_batch_sizes(coords["dp"])))
        reductions = self._reduction_operations(coords["pp"], coords["tp"])
        if self.layout.config.consistency.mode == "central":
            reductions = self._list_central_server_operations(rank)
        if self.layout.config.consistency.is_asynchronous:
            reductions = self._list_asynchronous_operations(rank)
        return reductions + model + self._list_muon_transfers(rank)

    def _list_replica_averaging_operations(self, rank: int) -> Counter[Operation]:
        """Count each collective and send of this rank in one averaging of all fragments of the replicas.

        These follow each other within `consistency.h` steps, in addition to `operations`; empty if the run averages no
        replicas.
        """
        how, policy = self.layout.config.consistency, self.layout.policy
        if not how.merges_replicas:
            return Counter()
        merged_together: Counter[tuple[int, tuple[int, ...]]] = Counter()  # elements: of a fragment, on the same ranks
        for parameter, start, stop in self.local_ranges(rank):
            merged_together[how.fragment_of(parameter.name), self.replicas(parameter, rank)] += stop - start
        element_bytes, replicas = states.master_bytes_when_merged(policy), len(self.group_ranks("outer", rank))
        # The weight of each replica in tokens, whether to stop or regroup, and whether its files are written.
        operations = Counter({("outer", "all_reduce", replicas + 3, DTYPE_BYTES["float64"]): how.fragments})
        for numel in merged_together.values():
            if how.mode == "gossip":
                neighbours = min(replicas - 1, 2 if how.topology == "ring" else 1)
                operations["outer", "send", numel, element_bytes] += neighbours * (numel > 0)
            elif how.mode == "diloco" and how.exchange == "int8":
                chunk = int8_chunk_bytes(numel, replicas)
                operations["outer", "all_to_all", replicas * chunk, 1] += 1
                operations["outer", "all_gather", replicas * chunk, 1] += 1
            else:
                operations["outer", "all_reduce", numel, element_bytes] += 1
        return operations

    def local_ranges(self, rank: int) -> Iterator[tuple[LocalParameter, int, int]]:
        """Yield each parameter and the range, (start, stop), of its local elements that this rank updates."""
        layout = self.layout
        parameters = {p.name: p for p in states.local_parameters(layout, layout.mesh.coords(rank)["pp"])}
        if not shards.uses_flat_params(layout):
            yield from ((parameter, 0, parameter.numel) for parameter in parameters.values())
            return
        for flat in self.flat_params(rank):
            for name, (start, stop) in flat.layout.param_ranges(self.shard_index(rank)).items():
                yield parameters[name], start, stop

    def replicas(self, parameter: LocalParameter, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the same elements of a parameter, ascending, this rank included."""
        dp_coords = replica_dp_coords(self.layout.mesh, self.layout.config, rank)
        tp_coords = states.replica_tp_coords(self.layout, parameter, rank)
        holders = ranks_with(self.layout.mesh, parameter.stages, dp_coords, tuple(tp_coords))
        return tuple(other for other in holders if self.shard_index(other) == self.shard_index(rank))

    def _list_central_server_operations(self, rank: int) -> Counter[Operation]:
        """Count the operations with a central server: gradients to it, parameters from it, token count and decision."""
        layout, double = self.layout, DTYPE_BYTES["float64"]
        sizes = [parameter.numel for parameter in states.local_parameters(layout, 0)]
        element_bytes, ranks = DTYPE_BYTES[layout.dtype], layout.mesh.dp
        operations = Counter([("loss", "all_reduce", 1, double), ("control", "all_reduce", 5, double)])
        if rank == layout.config.consistency.server:
            operations["grads", "send", sum(sizes), element_bytes] += ranks - 1
        else:  # with one element per parameter that says whether it was used
            operations["grads", "send", sum(sizes) + len(sizes), element_bytes] += 1
        return operations

    def _list_asynchronous_operations(self, rank: int) -> Counter[Operation]:
        """Count the messages between an asynchronous worker and its server in one step; none while the worker pauses.

        A message has a flag per parameter and one more, besides the gradients or parameters.
        """
        layout = self.layout
        sizes = [parameter.numel for parameter in states.local_parameters(layout, 0)]
        messages = layout.mesh.dp - 1 if rank == layout.config.consistency.server else 1
        return Counter({("outer", "send", sum(sizes) + len(sizes) + 1, DTYPE_BYTES[layout.dtype]): messages})

    def wire_bytes(self, rank: int) -> dict[str, int]:
        """Return the bytes that `rank` sends in one step, by the name of the group spec.

        Groups of one rank are left out, and so are the bytes of `replica_merge_bytes`.
        """
        return self._sent_bytes_by_group(rank, self.operations(rank))

    def replica_merge_bytes(self, rank: int) -> dict[str, int]:
        """Return the bytes that `rank` sends for one averaging of all fragments, by the name of the group spec.

        Replicas (local SGD, DiLoCo, gossip) are averaged every `consistency.h` steps; {} if the run averages no
        replicas.
        """
        return self._sent_bytes_by_group(rank, self._list_replica_averaging_operations(rank))

    def _sent_bytes_by_group(self, rank: int, operations: Counter[Operation]) -> dict[str, int]:
        """Return the bytes that `rank` sends in these operations, by group spec."""
        sent: Counter[str] = Counter()
        for (spec, name, elements, element_bytes), times in operations.items():
            group = self._groups[spec][rank]
            if len(group) > 1:
                sent_by_rank = sent_elements(name, elements, len(group), group.index(rank))
                sent[spec] += times * element_bytes * sent_by_rank
        return dict(sent)

    def _list_muon_transfers(self, rank: int) -> Counter[Operation]:
        """Count the transfers around Muon's update: shards to the owner of each matrix, and updated shards back."""
        ranks, policy = self.group_ranks("matrices", rank), self.layout.policy
        if len(ranks) < 2:
            return Counter()
        plan = self._matrix_plan(tuple(ranks))
        sent = sum(count_elements_sent_by_muon(plan, ranks.index(rank)))
        return Counter([("matrices", "send", sent, PRECISION_BYTES[policy.master or policy.state])])

    def _assign_matrix_owners(self, ranks: Sequence[int]) -> MatrixPlan:
        """Return which of `ranks` updates each matrix under Muon."""
        return assign_matrix_owners([self._matrix_shards(rank) for rank in ranks])

    def _matrix_shards(self, rank: int) -> dict[str, MatrixShard]:
        """Return the elements of each matrix of a layer that this rank stores, by name."""
        matrix_shards = {}
        for parameter, start, stop in self.local_ranges(rank):
            if is_hidden_matrix(parameter.name, parameter.dimensions):
                first = min(states.replica_tp_coords(self.layout, parameter, rank))
                matrix_shards[parameter.name] = MatrixShard((first, start, stop), stop - start)
        return matrix_shards

    def _list_reductions(self, stage: int, tensor: int) -> Counter[Operation]:
        """Count the reductions of gradients and token count, and the all-reduce of the ranks' decision on the step."""
        rank = self.layout.mesh.rank(pp=stage, tp=tensor)
        double = DTYPE_BYTES["float64"]
        # Loss, norm, whether to stop, whether a checkpoint is written, whether to continue with other ranks; with flat
        # gradients also which parameters of the model were used.
        agreed = 5
        if flat_params := self.flat_params(rank):
            reductions = shards.flat_param_operations(self.layout, flat_params, stage)
            agreed += states.count_parameter_tensors(self.layout.config.model)
        else:
            all_reduces = gradient_reduction.list_gradient_all_reduces(self.layout, self._groups, rank)
            reductions = Counter((spec, "all_reduce", numel, size) for spec, numel, size in all_reduces)
        return reductions + Counter([("loss", "all_reduce", 1, double), (self._control, "all_reduce", agreed, double)])

    def _list_model_operations(self, stage: int, micro_batches: tuple[int, ...]) -> Counter[Operation]:
        """Count the operations of forward and backward of the micro-batches that have samples, in all chunks."""
        operations: Counter[Operation] = Counter()
        for samples in filter(None, micro_batches):
            sizes = Dimensions.of_micro_batch(self.layout, samples)
            for number, chunk in enumerate(self.layout.stage_chunks(stage)):
                operations.update(self._list_tensor_parallel_operations(sizes, chunk))
                for operation in [
                    *self._list_context_parallel_operations(sizes),
                    *self._list_recomputed_operations(sizes),
                ]:
                    operations[operation] += len(chunk.layers)
                operations.update(self._list_pipeline_transfers(sizes, stage, number))
        return operations

    def _list_tensor_parallel_operations(self, sizes: Dimensions, chunk: ModelChunk) -> Counter[Operation]:
        """Count the operations that enter and leave the tensor-parallel regions, and the vocabulary-parallel loss."""
        layout = self.layout
        if layout.mesh.tp == 1:
            return Counter()
        # A layer has two regions, attention and feed-forward. The embedding only leaves one, the head only enters one.
        regions, element_bytes = 2 * len(chunk.layers), DTYPE_BYTES[layout.dtype]
        times = 2 * regions + chunk.has_embedding + chunk.has_head
        hidden, operations = sizes.local_numel(HIDDEN), Counter()
        if layout.sequence_parallel_size > 1:  # enter: all-gather, leave: reduce-scatter; backward the reverse
            operations["tensor", "all_gather", hidden, element_bytes] += times
            operations["tensor", "reduce_scatter", hidden, element_bytes] += times
        else:  # leaving all-reduces in forward, entering in backward
            operations["tensor", "all_reduce", hidden, element_bytes] += times
        if chunk.has_head:
            tokens, compute_bytes = sizes.local_numel(TOKENS), DTYPE_BYTES[layout.compute_dtype]
            operations["tensor", "all_reduce", tokens, compute_bytes] += 1  # the largest logit
            operations["tensor", "all_reduce", 2 * tokens, compute_bytes] += 1  # softmax denominator, label's logit
        return operations

    def _list_context_parallel_operations(self, sizes: Dimensions) -> Iterator[Operation]:
        """Yield the exchanges of one layer's attention, forward and backward."""
        layout, cp = self.layout, self.layout.mesh.cp
        if cp == 1:
            return
        element_bytes = DTYPE_BYTES[layout.dtype]
        if layout.config.parallel.context == "ring":
            keys_values = 2 * sizes.local_numel("b kv/tp s/cp d")
            for _ in range(cp - 1):
                yield "context", "send", keys_values, element_bytes
                yield "context", "send", keys_values, element_bytes
                yield "context", "send", keys_values, DTYPE_BYTES[layout.compute_dtype]  # their gradients
            return
        for formula in ("b exchanged s/cp d", "b heads/tp s/cp d"):  # queries, keys and values; attention's output
            yield "context", "all_to_all", sizes.local_numel(formula), element_bytes
            yield "context", "all_to_all", sizes.local_numel(formula), element_bytes

    def _list_recomputed_operations(self, sizes: Dimensions) -> Iterator[Operation]:
        """Yield the operations that the recomputation of one layer runs again."""
        layout, element_bytes = self.layout, DTYPE_BYTES[self.layout.dtype]
        recompute, cp, hidden = layout.config.recompute, layout.mesh.cp, sizes.local_numel(HIDDEN)
        if recompute == "none":
            return
        if cp > 1 and layout.config.parallel.context == "ring":
            for _ in range(cp - 1):
                yield "context", "send", 2 * sizes.local_numel("b kv/tp s/cp d"), element_bytes
        elif cp > 1:
            yield "context", "all_to_all", sizes.local_numel("b exchanged s/cp d"), element_bytes
            if recompute == "block":  # selective recomputation stops before attention's output is sent back
                yield "context", "all_to_all", sizes.local_numel("b heads/tp s/cp d"), element_bytes
        if recompute == "block" and layout.mesh.tp > 1:
            leaving = 1 + recomputes_down_projection(layout.config)
            if layout.sequence_parallel_size > 1:
                yield from 2 * [("tensor", "all_gather", hidden, element_bytes)]
                yield from leaving * [("tensor", "reduce_scatter", hidden, element_bytes)]
            else:
                yield from leaving * [("tensor", "all_reduce", hidden, element_bytes)]

    def _list_pipeline_transfers(self, sizes: Dimensions, stage: int, chunk: int) -> Counter[Operation]:
        """Count the sends of activations to the next chunk and of their gradients to the previous one.

        A chunk on the same stage gets them without a send.
        """
        schedule, operations = self.layout.schedule, Counter()
        if schedule is None:
            return operations
        position, elements = schedule.position(stage, chunk), sizes.local_numel(SHARDED_HIDDEN)
        for spec, neighbour in (("activations", position + 1), ("gradients", position - 1)):
            if 0 <= neighbour < schedule.num_parts and schedule.owner(neighbour)[0] != stage:
                operations[spec, "send", elements, DTYPE_BYTES[self.layout.dtype]] += 1
        return operations


def count_elements_sent_by_muon(plan: MatrixPlan, rank: int) -> tuple[int, int]:
    """Return how many elements `rank` sends to other ranks in one update of all matrices by Muon, as two numbers.

    The first counts the elements of its shards, sent to the rank that updates the matrix (the owner); the second counts
    updated elements, sent back to the ranks that store shards of the matrix (the holders).
    """
    shards = updates = 0
    for name, holders in plan.holders_by_matrix.items():
        if plan.owner_by_matrix[name] == rank:
            updates += sum(shard.numel for other, shard in holders.items() if other != rank)
        elif rank in plan.sender_ranks(name):
            shards += holders[rank].numel
    return shards, updates
