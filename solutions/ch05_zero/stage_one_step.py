"""Stage 1: reduce-scatter, update a shard, all-gather: the solution, as it stands in minidist.zero.flat_param.

An all-reduce is a reduce-scatter followed by an all-gather. Stage 1 puts the update between the two: reduce-scatter
the gradients, update one shard, all-gather the parameters. The number of bytes sent stays the same, and each rank
stores only its shard of the optimizer states, which take most of a model's memory.

The output of the reduce-scatter is this rank's slice of the flat gradient, so it needs no extra memory. If the
gradients are sent in another dtype, the communication needs copies, and the sum must be copied back into that slice
after the wait. Parameters are views of the flat parameter: one all-gather updates all of them, without further
copies.

Usual wrong answers:
* a missing gradient counts with the values of the previous step
* all-reduces the gradients, although a rank needs only its shard
* does not copy the output in the wire dtype back to the sum
* the mean over the ranks instead of the sum
* the package's own under the learner's names
* every gradient is one
* the flat parameter holds copies of the parameters, which do not see gathered values
* counts bounds from the start of the parameter
* counts bounds from the start of the flat parameter
* sends gradients in the accumulation dtype
* every rank broadcasts its shard: one message per rank
* waits for each all-gather before it launches the next
* also gathers the summed gradients, which no rank needs
* each rank updates its shard with its own gradient
* gathers the shards shifted by one rank
* the step ends while parameters are still in flight
* no rank sends its updated shard to the others
* the parameters are not views, and the flat parameter stays empty
* on rank 0 of three or more, the shard holds only its own gradient
* broadcasts rank 0's flat parameter, as if all its shards were updated
* parameters are views of a flat parameter that was never filled
* allocates and keeps a second buffer for the reduction's output
* waits for the reduction right after launching it
* every rank stores the full flat parameter twice
* every gradient is zero
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from minidist.comm import Group, Handle, all_gather, all_reduce, reduce_scatter
from minidist.precision.dtypes import PrecisionDtypes
from minidist.precision.masters import MasterWeights, RoundingFunction
from minidist.zero.plan import FlatLayout


class FullGradients:
    """Gradients of a flat parameter, accumulated in a full-length buffer for the whole step (stages 0 and 1).

    group: the ranks over which the gradients are sharded. replica_group: the ranks that hold the same shard, over which
    the shard is summed, too; None if only this rank holds it. full_buffer: (numel,), the flat gradient. result:
    (shard_numel,), this rank's shard, summed over all ranks after the reduction. transient: whether `full_buffer`
    exists only during a reduction; here False.
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
        self.layout, self.group, self.replica_group = layout, group, replica_group
        self.dtypes, self.device = dtypes, device
        self._in_flight: tuple[Handle, Tensor, Tensor] | None = None  # in flight: handle, output, destination
        self._allocate()

    def _allocate(self) -> None:
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

    def launch(self) -> None:
        """Collective: start the flat gradient's reduce-scatter (all-reduce if not sharded); missing gradients are 0."""
        for name in self.views.keys() - self.filled:
            self.views[name].zero_()
        if self.group.size > 1:
            self._reduce(self.full_buffer, self.result)
        else:  # not sharded: all-reduce the full gradient over the replicas
            self.launch_replica_all_reduce()

    def _reduce(self, full: Tensor, target: Tensor) -> Tensor:
        """Start the reduce-scatter of `full` into `target`, in the reduction dtype; return the tensor that is sent."""
        output = target
        if self.dtypes.reduce != self.dtypes.accumulate:
            full, output = full.to(self.dtypes.reduce), torch.empty_like(target, dtype=self.dtypes.reduce)
        self._in_flight = reduce_scatter(output, full, self.group, async_op=True), output, target
        return full

    def launch_replica_all_reduce(self) -> None:
        """Collective: start the all-reduce of this rank's shard over `replica_group`, if there is one."""
        if self.replica_group is not None:
            sent = self.result.to(self.dtypes.reduce)  # no copy if the dtypes are equal
            self._in_flight = all_reduce(sent, self.replica_group, async_op=True), sent, self.result

    def wait(self) -> None:
        """Wait for the reduction in flight, if there is one; `result` then holds the reduced shard."""
        if self._in_flight is not None:
            handle, output, target = self._in_flight
            handle.wait()
            if output is not target:
                target.copy_(output)
            self._in_flight = None

    def launch_final_reduction(self) -> None:
        """Collective: start the all-reduce over `replica_group` that ends the step, unless `launch` has done so."""
        if self.group.size > 1:
            self.wait()
            self.launch_replica_all_reduce()

    def clear(self) -> None:
        """Forget the gradients of this step, so that `accumulate` begins new sums."""
        self.filled.clear()

    def discard_aborted_step(self) -> None:
        """Forget the gradients of an aborted step and allocate new buffers: the old ones may still be in flight."""
        self._in_flight = None
        self.clear()
        self._allocate()


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
        self.parameters, self.layout, self.group = dict(parameters), layout, group
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
        """This rank's shard of the flat buffer, (end - begin,)."""
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
