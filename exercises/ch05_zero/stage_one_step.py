"""Stage 1: reduce-scatter, update a shard, all-gather.

Write the missing lines of FullGradients and FlatParam; their docstrings specify the results.
You may call: reduce_scatter, all_gather, FlatLayout.shard_bounds, FlatLayout.param_ranges, Handle.wait, Tensor.to,
Tensor.copy_, Tensor.zero_, Tensor.view, torch.empty_like.
Check it with: python -m exercises check stage_one_step

Stub 2176a53f.
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
        raise NotImplementedError("set the gradients to zero that backward did not compute")
        if self.group.size > 1:
            self._reduce(self.full_buffer, self.result)
        else:  # not sharded: all-reduce the full gradient over the replicas
            self.launch_replica_all_reduce()

    def _reduce(self, full: Tensor, target: Tensor) -> Tensor:
        """Start the reduce-scatter of `full` into `target`, in the reduction dtype; return the tensor that is sent."""
        raise NotImplementedError("start the reduce-scatter of the flat gradient into target, in the wire dtype")
        return full

    def launch_replica_all_reduce(self) -> None:
        """Collective: start the all-reduce of this rank's shard over `replica_group`, if there is one."""
        if self.replica_group is not None:
            sent = self.result.to(self.dtypes.reduce)  # no copy if the dtypes are equal
            self._in_flight = all_reduce(sent, self.replica_group, async_op=True), sent, self.result

    def wait(self) -> None:
        """Wait for the reduction in flight, if there is one; `result` then holds the reduced shard."""
        if self._in_flight is not None:
            raise NotImplementedError("wait for the reduce-scatter; the result must be in target")
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
        raise NotImplementedError("compute which elements of the shard belong to each parameter")
        device = next(iter(parameters.values())).device
        self.full_buffer = torch.zeros(layout.numel, dtype=dtypes.parameter, device=device)
        raise NotImplementedError("copy the parameters into the flat parameter and make them views of it")
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
        raise NotImplementedError("start the all-gather of the flat parameter")

    def wait_gather(self) -> None:
        """Wait for the all-gather that `launch_gather` started, if it has not been waited for."""
        raise NotImplementedError("wait for the all-gather, if one was started")
