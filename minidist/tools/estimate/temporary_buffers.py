"""Bytes of gradients, and of ZeRO's temporary buffers, at each place of a step.

ZeRO-3 gathers a layer's parameters while the layer computes, and prefetches the next layer's parameters; the last
layer of forward stays gathered. In ZeRO-2 and ZeRO-3, once all gradients of a flat parameter are ready, they are copied
into a flat gradient, which is reduced to this rank's shard. At most two flat gradients are in flight, one while another
is filled.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence, Set
from typing import NamedTuple

from minidist.precision.policy import PRECISION_BYTES
from minidist.process_groups import is_hidden_matrix
from minidist.tools.estimate import shards, states
from minidist.tools.estimate.layout import RunLayout
from minidist.tools.estimate.shards import LocalFlatParam
from minidist.zero.plan import ROOT

# A place in backward is a layer's number or one of these: head and final norm, embedding, end of backward.
HEAD, EMBEDDING, DONE = "head", "embedding", "done"
MAX_IN_FLIGHT = 2  # flat gradients


class GradientAndBufferBytes(NamedTuple):
    """Bytes of gradients and of temporary buffers on one rank, at one time of a backward.

    gradients: bytes of the gradients, allocated so far, that stay until the update. buffers: bytes that are freed
    before the update: computed gradients that wait until all gradients of their flat parameter are computed, and flat
    gradients, or copies of them in the dtype of the reduction, whose reduction is in flight.
    """

    gradients: int
    buffers: int


class GradientAndBufferSizes:
    """Computes the bytes of gradients and of ZeRO's temporary buffers on one rank at any time of a step.

    flat_params: the rank's flat parameters, in the order in which backward completes their gradients. gradient_bytes:
    bytes of the rank's gradients just before the update. accumulates: whether a step has more than one micro-batch.

    Three arguments of the methods give the time. chunk: the index of the model chunk on the pipeline stage. place: the
    number of the layer whose backward runs, or HEAD, EMBEDDING or DONE. num_ready: how many parameters of that layer
    have their gradients.
    """

    def __init__(
        self,
        layout: RunLayout,
        stage: int,
        flat_params: Sequence[LocalFlatParam],
        gradient_bytes: int,
        accumulates: bool,
    ):
        self.layout, self.stage, self.flat_params = layout, stage, flat_params
        self.gradient_bytes, self.accumulates = gradient_bytes, accumulates
        self.zero, self.policy = layout.config.zero, layout.policy
        self.grad_size = PRECISION_BYTES[self.policy.accumulate]  # per element
        self.wire_size = PRECISION_BYTES[self.policy.reduce]
        self._parameters = {parameter.name: parameter for parameter in states.local_parameters(layout, stage)}

    # -- parameters ---------------------------------------------------------------------------------------------------

    def gathered_parameter_bytes(
        self, chunk: int, place: int | str, forward: bool = False, prefetching: bool = True
    ) -> int:
        """Return the bytes of the flat parameters that ZeRO-3 has gathered at a time of a step; else 0.

        chunk: the index of the model chunk on the pipeline stage. place: the number of the layer whose backward runs,
        or HEAD, EMBEDDING or DONE. forward: the time is the end of forward, not in backward. prefetching: the next
        layer's all-gather is in flight too.
        """
        if self.zero.stage < 3:
            return 0
        model_chunk = self.layout.stage_chunks(self.stage)[chunk]
        last = model_chunk.layers[-1:] if self.zero.prefetch or self.zero.keep_last_block else ()
        if forward:
            last = last if model_chunk.has_head and self.zero.keep_last_block else ()
        blocks = {HEAD: last, EMBEDDING: model_chunk.layers[:1], DONE: model_chunk.layers[:1]}.get(place)
        if blocks is None:
            blocks = [i for i in (place, place - (self.zero.prefetch and prefetching)) if i in model_chunk.layers]
        gathered = {*blocks, *([ROOT] if model_chunk.has_embedding or model_chunk.has_head else [])}
        numel = sum(flat.layout.numel for flat in self.flat_params if flat.block in gathered)
        return numel * PRECISION_BYTES[self.policy.parameter]

    # -- gradients ----------------------------------------------------------------------------------------------------

    def gradient_bytes_before_backward(self) -> int:
        """Return the bytes of the gradients that exist when the last backward of a step begins."""
        return 0 if self._allocates_shards_in_backward and not self.accumulates else self.gradient_bytes

    def gradient_and_buffer_bytes(
        self, chunk: int, place: int | str, num_ready: int, split_backward: bool = False
    ) -> GradientAndBufferBytes:
        """Return the bytes of gradients and of temporary buffers on a rank at one time of backward.

        chunk: the index of the model chunk on the pipeline stage. place: the number of the layer whose backward runs,
        or HEAD, EMBEDDING or DONE. num_ready: how many parameters of that layer have their gradients. split_backward:
        this backward leaves the gradients of weight matrices to a later action (W).
        """
        names = self._ready_gradients(chunk, place, num_ready)
        if split_backward:
            names = {
                name
                for name in names
                if self._parameters[name].dimensions < 2 or name == states.EMBEDDING_PARAMETERS[0][0]
            }
        if not shards.uses_flat_params(self.layout):
            computed = sum(self._parameters[name].numel for name in names) * self.grad_size
            return GradientAndBufferBytes(
                computed if self._allocates_shards_in_backward and not self.accumulates else self.gradient_bytes, 0
            )
        launched = self.launched_reductions(chunk, place, num_ready)
        if not self.zero.shards_gradients:
            in_flight = [self._send_bytes(flat) for flat in launched if self.zero.stage]
            return GradientAndBufferBytes(
                self.gradient_bytes, sum(in_flight) if self.wire_size != self.grad_size else 0
            )
        buffers = self._waiting_bytes(names, launched) + self._in_flight_bytes(chunk, launched, MAX_IN_FLIGHT)
        return GradientAndBufferBytes(self._gradient_shard_bytes(launched), buffers)

    def bytes_while_filling_flat_gradient(
        self, chunk: int, flat_param_index: int, place: int | str, num_ready: int
    ) -> GradientAndBufferBytes:
        """Return the bytes of gradients and temporary buffers while one flat gradient is filled and then sent.

        chunk: the index of the model chunk on the pipeline stage. flat_param_index: which of the chunk's flat
        parameters the flat gradient belongs to. place: the number of the layer whose backward runs, or HEAD, EMBEDDING
        or DONE. num_ready: how many parameters of that layer have their gradients.
        """
        flat_params, names = self._flat_params_of(chunk), self._ready_gradients(chunk, place, num_ready)
        before, flat = flat_params[:flat_param_index], flat_params[flat_param_index]
        full, shard = flat.layout.numel * self.grad_size, flat.layout.shard_numel * self.grad_size
        waiting = self._waiting_bytes(names, [*before, flat])
        copied = self._waiting_bytes(names & flat.layout.slots.keys(), [])
        wire_copies = self._send_bytes(flat) if self.wire_size != self.grad_size else 0
        buffers = full + waiting + max(copied, shard * self.accumulates + wire_copies)
        return GradientAndBufferBytes(
            self._gradient_shard_bytes(before), buffers + self._in_flight_bytes(chunk, before, MAX_IN_FLIGHT - 1)
        )

    def launched_reductions(self, chunk: int, place: int | str, num_ready: int) -> list[LocalFlatParam]:
        """Return the flat parameters whose gradient reduction has been launched at one time of a chunk's backward.

        place: the number of the layer whose backward runs, or HEAD, EMBEDDING or DONE. num_ready: how many parameters
        of that layer have their gradients. A reduction is launched once all gradients of the flat parameter are ready;
        in ZeRO-3, once backward has also left its layer; in ZeRO-2 and ZeRO-3 under a pipeline, once the backward of
        the chunk has ended.
        """
        flat_params, names = self._flat_params_of(chunk), self._ready_gradients(chunk, place, num_ready)
        if place == DONE:
            return flat_params
        if self.layout.mesh.pp > 1 and self.zero.shards_gradients:
            return []
        if self.zero.stage == 3:
            first_layer = self.layout.stage_chunks(self.stage)[chunk].layers[0]
            current = {HEAD: len(self._parameters), EMBEDDING: first_layer}.get(place, place)
            return [flat for flat in flat_params if flat.block > current]
        return list(itertools.takewhile(lambda flat: flat.layout.slots.keys() <= names, flat_params))

    def _flat_params_of(self, chunk: int) -> list[LocalFlatParam]:
        """Return the flat parameters whose gradients the backward of this chunk completes."""
        return [flat for flat in self.flat_params if flat.chunk == chunk]

    def _gradient_shard_bytes(self, launched: Sequence[LocalFlatParam]) -> int:
        """Return the bytes of gradient shards on this rank once these reductions are launched."""
        return (
            self.gradient_bytes
            if self.accumulates
            else sum(flat.layout.shard_numel for flat in launched) * self.grad_size
        )

    def _waiting_bytes(self, ready: Set[str], launched: Sequence[LocalFlatParam]) -> int:
        """Bytes of the gradients that autograd has computed and no launched reduction has copied."""
        names = ready.difference(*(flat.layout.slots for flat in launched))
        return sum(self._parameters[name].numel for name in names) * PRECISION_BYTES[self.policy.parameter]

    def _in_flight_bytes(self, chunk: int, launched: Sequence[LocalFlatParam], limit: int) -> int:
        """Bytes of the last `limit` launched flat gradients and of their shards; 0 if one rank has all shards."""
        if self.layout.config.zero.shard_group_size(self.layout.replica_mesh) == 1:
            return 0
        earlier = self._flat_params_of(chunk) if self.accumulates else []  # of the previous micro-batch
        in_flight = [*earlier, *launched][-limit:]
        return sum(
            self._send_bytes(flat) + self.accumulates * flat.layout.shard_numel * self.grad_size for flat in in_flight
        )

    def _send_bytes(self, flat: LocalFlatParam) -> int:
        """Bytes of a flat gradient in flight: the gradient itself, or its copy and its result in the dtype of the
        reduction. A group of one rank sends nothing."""
        full = flat.layout.numel if self.layout.config.zero.shard_group_size(self.layout.replica_mesh) > 1 else 0
        if self.wire_size == self.grad_size:
            return full * self.grad_size
        return (full + flat.layout.shard_numel) * self.wire_size

    @property
    def _allocates_shards_in_backward(self) -> bool:
        """Whether backward allocates the gradient shards one by one, as ZeRO-2 and ZeRO-3 do."""
        return shards.uses_flat_params(self.layout) and self.zero.shards_gradients

    def _ready_gradients(self, chunk: int, place: int | str, num_ready: int) -> set[str]:
        """The names of the chunk's parameters whose gradients are computed."""
        model_chunk = self.layout.stage_chunks(self.stage)[chunk]
        if place == DONE:
            return {name for flat in self._flat_params_of(chunk) for name in flat.layout.slots}
        ready_names = (
            [name for name, _, _ in reversed(states.HEAD_PARAMETERS) if name in self._parameters]
            if model_chunk.has_head
            else []
        )
        if place == HEAD:
            return set(ready_names[:num_ready])
        for index in reversed(model_chunk.layers):
            names = [f"model.layers.{index}.{name}" for name, _, _ in reversed(states.LAYER_PARAMETERS)]
            if index == place:
                return {*ready_names, *names[:num_ready]}
            ready_names += names
        return {*ready_names, *([states.EMBEDDING_PARAMETERS[0][0]] if num_ready and model_chunk.has_embedding else [])}

    # -- after backward -----------------------------------------------------------------------------------------------

    def reduce_dtype_copy_bytes_after_backward(self) -> int:
        """Return the bytes of flat gradients' copies in the dtype of the reduction, still in flight after backward."""
        copied = self.zero.stage > 0 and self.wire_size != self.grad_size and not self.zero.shards_gradients
        return sum(map(self._send_bytes, self.flat_params)) * copied

    def merge_temporary_bytes(self) -> int:
        """Return the bytes of the temporary tensors of averaging replicas by local SGD or DiLoCo; else 0.

        They are a copy of the masters in the largest fragment, and under DiLoCo the outer gradient. Quantization takes
        about three more, a copy of its errors (kept until all communication is done), and a byte per element to send.
        """
        how, fragments = self.layout.config.consistency, Counter[int]()
        for parameter in self._parameters.values():
            fragments[how.fragment_of(parameter.name)] += parameter.numel
        flat = [flat.layout.shard_numel for flat in self.flat_params] or [fragments.total()]
        largest = sum(flat) * max(fragments.values()) / fragments.total()
        element_bytes = states.master_bytes_when_merged(self.policy)
        tensor_bytes = {"local": 1, "diloco": 2}.get(how.mode, 0) * element_bytes
        if how.mode == "diloco" and how.exchange == "int8":
            tensor_bytes += 4 * element_bytes + 1
        return math.ceil(largest * tensor_bytes)

    def optimizer_temporary_bytes(self) -> int:
        """Return the bytes of the temporary tensors that the optimizer's update allocates.

        Gradients or parameters of another dtype than the optimizer's are converted one shard at a time. Muon's
        orthogonalisation takes six tensors of a matrix's size and a square one. Where matrices are sharded, Muon also
        takes about four copies of this rank's shards, sent and received before and after the update.
        """
        policy, master_size = self.policy, PRECISION_BYTES[self.policy.master or self.policy.state]
        no_masters = policy.master is None and master_size != PRECISION_BYTES[policy.parameter]
        copies = (master_size != self.grad_size) + no_masters
        largest = max((flat.layout.shard_numel for flat in self.flat_params), default=0) * master_size * copies
        if self.layout.config.optim.kind != "muon":
            return largest
        hidden, tp = self.layout.config.model.hidden_size, self.layout.mesh.tp
        shard_ranks = self.layout.config.zero.shard_group_size(self.layout.replica_mesh)
        local = [p.numel for p in self._parameters.values() if is_hidden_matrix(p.name, p.dimensions)]
        full = [numel * tp for numel in local]
        muon = max((6 * numel + min(hidden, numel // hidden) ** 2 for numel in full), default=0)
        muon += 4 * -(-sum(local) // shard_ranks) if tp * shard_ranks > 1 else 0
        return largest + muon * master_size
