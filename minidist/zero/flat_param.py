"""A flat parameter and its gradients: the buffers, their collectives, and this rank's shards.

Gradients are stored in one of two ways between micro-batches. `FullGradients` (stages 0 and 1) accumulates them in a
full-length flat buffer and reduces it once per step, in place: the shard is a slice of the buffer. `ShardedGradients`
(stages 2 and 3) keeps the gradients of a micro-batch as autograd returned them until those of all parameters in the
flat parameter have been computed. Then it copies them into a full-length buffer that lives until its reduction
completes, and adds the result to a shard that is kept until the step ends. Rajbhandari et al. 2020 (ZeRO, arXiv
1910.02054), section 5.2.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from minidist.comm import Group, Handle, all_gather, all_reduce, reduce_scatter
from minidist.precision.dtypes import PrecisionDtypes
from minidist.precision.masters import MasterWeights, RoundingFunction
from minidist.zero.plan import FlatLayout


class FlatParam:
    """Parameters concatenated in one flat buffer that is sharded over a group.

    parameters: the model's parameters, by name; they become views of the buffer. values: their values in full
    precision. layout: where each parameter lies in the buffer. group: the ranks over which the buffer is sharded.
    dtypes, offload, rounding: as in `MasterWeights`.
    full_buffer: (numel,), the flat buffer that forward and backward read. shard: (shard_numel,), this rank's shard of
    it. masters: the tensors that the optimizer updates for this shard. param_bounds: for each parameter with elements
    in the shard, the (start, stop) of these elements in the shard, by name.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        values: Mapping[str, Tensor],
        layout: FlatLayout,
        group: Group,
        dtypes: PrecisionDtypes,
        offload: bool = False,
        rounding: RoundingFunction | None = None,
    ):
        self.parameters = dict(parameters)
        self.layout = layout
        self.group = group
        begin, end = layout.shard_bounds(group.rank)
        ranges = layout.param_ranges(group.rank)  # indices into each parameter
        self.param_bounds = {
            name: (layout.slots[name].start + start - begin, layout.slots[name].start + stop - begin)
            for name, (start, stop) in ranges.items()
        }
        device = next(iter(parameters.values())).device
        self.full_buffer = torch.zeros(layout.numel, dtype=dtypes.parameter, device=device)
        for name, parameter in parameters.items():
            view = self.full_buffer[layout.slots[name].start : layout.slots[name].stop].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
        self.shard = self._take_shard(begin, end)
        shard_values = {name: values[name].reshape(-1)[start:stop] for name, (start, stop) in ranges.items()}
        self.masters = MasterWeights(self.shard, self.param_bounds, shard_values, dtypes, offload, rounding)
        self._gather_handle: Handle | None = None

    def _take_shard(self, begin: int, end: int) -> Tensor:
        """Return this rank's shard of the flat buffer, (end - begin,), as a view of it."""
        return self.full_buffer[begin:end]

    @torch.no_grad()
    def launch_gather(self) -> None:
        """Collective: start the all-gather of all ranks' shards into `full_buffer`."""
        self._gather_handle = all_gather(self.full_buffer, self.shard, self.group, async_op=True)

    def wait_gather(self) -> None:
        """Wait for the all-gather that `launch_gather` started, if it has not been waited for."""
        if self._gather_handle is not None:
            self._gather_handle.wait()
            self._gather_handle = None


class ShardedFlatParam(FlatParam):
    """A `FlatParam`, with its arguments, whose full buffer is allocated only while it is unsharded (stage 3)."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.is_unsharded = True
        self.reshard()

    def _take_shard(self, begin: int, end: int) -> Tensor:
        """Return a copy of this rank's shard, which outlives the flat buffer."""
        return super()._take_shard(begin, end).clone()  # outlives the full buffer

    @torch.no_grad()
    def launch_gather(self) -> None:
        """Collective: allocate `full_buffer` and start its all-gather, unless done since the last `reshard`."""
        if not self.is_unsharded:
            self.is_unsharded = True
            self.full_buffer.untyped_storage().resize_(self.full_buffer.numel() * self.full_buffer.element_size())
            super().launch_gather()

    def reshard(self) -> None:
        """Free the storage of `full_buffer`; views in the model and in autograd see the next all-gather's data."""
        if self.is_unsharded:
            self.wait_gather()
            self.is_unsharded = False
            self.full_buffer.untyped_storage().resize_(0)


class FullGradients:
    """Gradients of a flat parameter, accumulated in a full-length buffer for the whole step (stages 0 and 1).

    layout: where each parameter's gradient lies in the buffer. group: the ranks over which the gradients are sharded.
    replica_group: the ranks that hold the same shard, over which the shard is summed, too; None if only this rank holds
    it. dtypes: `accumulate` for the buffer, `reduce` for the reductions.
    Attributes: full_buffer: (numel,), the flat gradient. result: (shard_numel,), this rank's shard of it, summed over
    all ranks after the reduction. transient: whether `full_buffer` exists only during a reduction; here False.
    """

    transient = False

    def __init__(
        self,
        layout: FlatLayout,
        group: Group,
        replica_group: Group | None,
        dtypes: PrecisionDtypes,
        device: torch.device,
    ):
        self.layout = layout
        self.group = group
        self.replica_group = replica_group
        self.dtypes = dtypes
        self.device = device
        self._in_flight: tuple[Handle, Tensor, Tensor] | None = None  # in flight: handle, output, destination
        self._allocate()

    def _allocate(self) -> None:
        """Allocate the flat gradient; no parameter has a gradient yet."""
        self.full_buffer = torch.zeros(self.layout.numel, dtype=self.dtypes.accumulate, device=self.device)
        self.views = {name: self.full_buffer[slot.start : slot.stop] for name, slot in self.layout.slots.items()}
        self.filled: set[str] = set()  # parameters with a gradient in this step
        self.result = self.full_buffer[slice(*self.layout.shard_bounds(self.group.rank))]

    def live_tensors(self) -> list[Tensor | None]:
        """Return the gradient tensors in memory now, for memory measurements; None for one that is not allocated."""
        return [self.full_buffer, self.result]

    def accumulate(self, name: str, grad: Tensor) -> None:
        """Accumulate a local gradient of parameter `name` into the full-length buffer; `grad` is copied.

        grad: as many elements as the parameter, in any shape and dtype.
        """
        view = self.views[name].view_as(grad)
        if name in self.filled:
            view.add_(grad)
        else:
            view.copy_(grad)
            self.filled.add(name)

    def launch_reduction(self) -> None:
        """Collective: start the flat gradient's reduce-scatter (all-reduce if not sharded); missing gradients are 0."""
        for name in self.views.keys() - self.filled:
            self.views[name].zero_()
        if self.group.size > 1:
            self._reduce(self.full_buffer, self.result)
        else:  # not sharded: all-reduce the full gradient over the replicas
            self._start_replica_all_reduce()

    def _reduce(self, full: Tensor, target: Tensor) -> Tensor:
        """Start the reduce-scatter of `full` into `target`, in the reduction dtype; return the tensor that is sent."""
        output = target
        if self.dtypes.reduce != self.dtypes.accumulate:
            full = full.to(self.dtypes.reduce)
            output = torch.empty_like(target, dtype=self.dtypes.reduce)
        self._in_flight = reduce_scatter(output, full, self.group, async_op=True), output, target
        return full

    def _start_replica_all_reduce(self) -> None:
        """Collective: start the all-reduce of `result`, this rank's shard of the gradient, over the `replica_group`.

        A reduce-scatter over `group` must have completed. Does nothing if `replica_group` is None.
        """
        if self.replica_group is not None:
            sent = self.result.to(self.dtypes.reduce)  # no copy if the dtypes are equal
            self._in_flight = all_reduce(sent, self.replica_group, async_op=True), sent, self.result

    def wait_reduction(self) -> None:
        """Wait for the reduction in flight, if there is one; `result` then holds the reduced shard."""
        if self._in_flight is not None:
            handle, output, target = self._in_flight
            handle.wait()
            if output is not target:
                target.copy_(output)
            self._in_flight = None

    def launch_replica_all_reduce(self) -> None:
        """Collective, once a step: wait for the reduce-scatter, then start the all-reduce of the shard over replicas.

        Only with hybrid sharding: does nothing without `replica_group`, or if `launch_reduction` has started it.
        """
        if self.group.size > 1:
            self.wait_reduction()
            self._start_replica_all_reduce()

    def clear(self) -> None:
        """Forget the gradients of this step, so that `accumulate` begins new sums."""
        self.filled.clear()

    def discard_aborted_step(self) -> None:
        """Forget the gradients of an aborted step and allocate new buffers: the old ones may still be in flight."""
        self._in_flight = None
        self.clear()
        self._allocate()


class ShardedGradients(FullGradients):
    """Gradients of a flat parameter, at full length only in flight, accumulated in this rank's shard (stages 2, 3).

    Until all gradients of a micro-batch have been added, each is kept as autograd returned it. full_buffer: None unless
    in flight. result: None until the first reduction of a step has completed, and after `clear`.
    """

    transient = True

    def _allocate(self) -> None:
        """Start without gradients: buffers are allocated when they are needed."""
        self._local_grads: dict[str, Tensor] = {}
        self.full_buffer = self.result = None

    def live_tensors(self) -> list[Tensor | None]:
        return [*self._local_grads.values(), *super().live_tensors()]

    def accumulate(self, name: str, grad: Tensor) -> None:
        """Accumulate a local gradient of parameter `name`. Takes ownership: the caller must not use `grad` again."""
        if name in self._local_grads:
            grad = self._local_grads[name].to(self.dtypes.accumulate).add_(grad)
        self._local_grads[name] = grad

    def _make_flat_gradient(self) -> Tensor:
        """Move the gradients of this micro-batch to a new flat buffer, (numel,), with zeros for missing ones."""
        flat_grad = torch.empty(self.layout.numel, dtype=self.dtypes.accumulate, device=self.device)
        flat_grad[flat_grad.numel() - self.layout.padding :].zero_()  # padding is sent too
        for name, slot in self.layout.slots.items():
            view = flat_grad[slot.start : slot.stop]
            grad = self._local_grads.pop(name, None)
            if grad is None:
                view.zero_()
            else:
                view.view_as(grad).copy_(grad)
        return flat_grad

    def _make_shard(self) -> Tensor:
        """Allocate a shard of the flat gradient, (shard_numel,), uninitialised."""
        return torch.empty(self.layout.shard_numel, dtype=self.dtypes.accumulate, device=self.device)

    def launch_reduction(self) -> None:
        """Collective: start the reduce-scatter of the micro-batch's gradients; first wait for an earlier one."""
        self.wait_reduction()
        self.full_buffer = self._reduce(self._make_flat_gradient(), self._make_shard())

    def wait_reduction(self) -> None:
        """Wait for the reduction in flight and add it to `result`."""
        if self._in_flight is None:
            return
        target = self._in_flight[2]
        super().wait_reduction()
        self.full_buffer = None
        if self.result is None:
            self.result = target
        elif target is not self.result:  # the sum over replicas is in place
            self.result.add_(target)

    def launch_replica_all_reduce(self) -> None:
        """Wait for the last micro-batch's reduce-scatter; then start the all-reduce over `replica_group`, if any."""
        self.wait_reduction()
        if self.result is None:  # the step had no micro-batch
            self.result = self._make_shard().zero_()
        self._start_replica_all_reduce()

    def clear(self) -> None:
        self.result = None
