"""Stage 1: reduce-scatter, update a shard, all-gather: the solution, as it stands in minidist.zero.flat_param.

An all-reduce is a reduce-scatter followed by an all-gather. Stage 1 puts the update between the two: reduce-scatter
the gradients, update one shard, all-gather the parameters. The number of bytes sent stays the same, and each rank
stores only its shard of the optimizer states, which take most of a model's memory.

The output of the reduce-scatter is this rank's slice of the flat gradient, so it needs no extra memory. If the
gradients are sent in another dtype, the communication needs copies, and the sum must be copied back into that slice
after the wait. Parameters are views of the flat parameter: one all-gather updates all of them, without further
copies.

Usual wrong answers:
* what was there in the step before is summed again
* gradients are all-reduced, of which a rank needs a shard only
* what arrives in the format of the wire never comes back to the sum
* the mean over the ranks instead of the sum
* the package's own under the learner's names
* every gradient is one
* the row has a copy of the parameters, which do not see what is gathered
* bounds are counted from the begin of the parameter
* bounds are counted from the begin of the row
* gradients travel in the format in which they are added up
* every rank broadcasts its part, a message for each rank
* a gather is waited for before the next one is launched
* the summed gradients are gathered as well, and nobody needs them
* each rank updates its shard with its own gradient
* the parts are gathered, each one place further on
* the step ends while parameters are still in flight
* every rank keeps its own shard to itself
* parameters stay where they were, and the row stays empty
* on rank 0 of three or more the shard holds its own gradient only
* rank 0 tells its row, as if all shards were up to date there
* parameters are views of a row that was never filled with their numbers
* the reduction ends in memory of its own, which is kept
* the reduction is waited for where it is launched
* every rank keeps the whole row a second time
* every gradient is zero
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from minidist.comm import Group, Handle, all_gather, all_reduce, reduce_scatter
from minidist.precision.dtypes import PrecisionDtypes
from minidist.precision.masters import MasterWeights, Rounding
from minidist.zero.plan import Layout


class FullGradients:
    """Gradients of a flat parameter, accumulated in a full-length buffer for the whole step (stages 0 and 1).

    group: the ranks over which the gradients are sharded. outer: the ranks that hold the same shard and sum it; None if
    this is the only one. row: (numel,), the flat gradient. result: (shard,), this rank's shard, summed over all ranks
    once the reducer has finished. transient: whether the full-length buffer lives only while it is reduced.
    """

    transient = False

    def __init__(
        self, layout: Layout, group: Group, outer: Group | None, formats: PrecisionDtypes, device: torch.device
    ):
        self.layout, self.group, self.outer, self.formats, self.device = layout, group, outer, formats, device
        self._arriving: tuple[Handle, Tensor, Tensor] | None = None  # in flight: handle, output, destination
        self._allocate()

    def _allocate(self) -> None:
        self.row = torch.zeros(self.layout.numel, dtype=self.formats.accumulate, device=self.device)
        self.views = {name: self.row[slot.start : slot.stop] for name, slot in self.layout.slots.items()}
        self.filled: set[str] = set()  # parameters with a gradient in this step
        self.result = self.row[slice(*self.layout.bounds(self.group.rank))]

    def held(self) -> list[Tensor | None]:
        """The gradient tensors held now, for memory measurements."""
        return [self.row, self.result]

    def add(self, name: str, grad: Tensor) -> None:
        """Accumulate a local gradient of a parameter, of any shape and dtype."""
        view = self.views[name].view_as(grad)
        if name in self.filled:
            view.add_(grad)
        else:
            view.copy_(grad)
            self.filled.add(name)

    def launch(self) -> None:
        """Start the reduction; a missing gradient counts as zero."""
        for name in self.views.keys() - self.filled:
            self.views[name].zero_()
        if self.group.size > 1:
            self._reduce(self.row, self.result)
        else:  # not sharded: all-reduce the full gradient over the replicas
            self.sum_replicas()

    def _reduce(self, row: Tensor, target: Tensor) -> Tensor:
        """Start the reduce-scatter of `row` into `target`, in the reduction dtype; return the tensor that is sent."""
        output = target
        if self.formats.reduce != self.formats.accumulate:
            row, output = row.to(self.formats.reduce), torch.empty_like(target, dtype=self.formats.reduce)
        self._arriving = reduce_scatter(output, row, self.group, async_op=True), output, target
        return row

    def sum_replicas(self) -> None:
        """Start the all-reduce of this shard over its replicas."""
        if self.outer is not None:
            sent = self.result.to(self.formats.reduce)  # no copy if the dtypes are equal
            self._arriving = all_reduce(sent, self.outer, async_op=True), sent, self.result

    def wait(self) -> None:
        """Wait for the reduction in flight; `result` then holds its sum."""
        if self._arriving is not None:
            handle, arrived, target = self._arriving
            handle.wait()
            if arrived is not target:
                target.copy_(arrived)
            self._arriving = None

    def start_finish(self) -> None:
        """Start the sum over replicas, once every reduction over the group has been launched."""
        if self.group.size > 1:
            self.wait()
            self.sum_replicas()

    def clear(self) -> None:
        """Forget the step."""
        self.filled.clear()

    def abandon(self) -> None:
        """Forget an aborted step and allocate new buffers: those in flight stay with their operations."""
        self._arriving = None
        self.clear()
        self._allocate()


class FlatParam:
    """Parameters concatenated in one flat buffer that is sharded over a group.

    parameters: of the model; they become views of the buffer. values: their values in full precision. group: the ranks
    over which the buffer is sharded. host, rounding: see `MasterWeights`.
    row: (numel,), the flat buffer that forward and backward read. part: (shard,), this rank's shard of it. masters: the
    tensors of this shard that the optimizer updates. bounds: (start, stop) in the shard of each parameter with elements
    in it, by name.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        values: Mapping[str, Tensor],
        layout: Layout,
        group: Group,
        formats: PrecisionDtypes,
        host: bool = False,
        rounding: Rounding | None = None,
    ):
        self.parameters, self.layout, self.group = dict(parameters), layout, group
        begin, end = layout.bounds(group.rank)
        held = layout.held(group.rank)  # indices into each parameter
        self.bounds = {
            name: (layout.slots[name].start + start - begin, layout.slots[name].start + stop - begin)
            for name, (start, stop) in held.items()
        }
        device = next(iter(parameters.values())).device
        self.row = torch.zeros(layout.numel, dtype=formats.parameter, device=device)
        for name, parameter in parameters.items():
            view = self.row[layout.slots[name].start : layout.slots[name].stop].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
        self.part = self._own(begin, end)
        mine = {name: values[name].reshape(-1)[start:stop] for name, (start, stop) in held.items()}
        self.masters = MasterWeights(self.part, self.bounds, mine, formats, host, rounding)
        self._gathering: Handle | None = None

    def _own(self, begin: int, end: int) -> Tensor:
        """This rank's shard of the flat buffer, (end - begin,)."""
        return self.row[begin:end]

    @torch.no_grad()
    def launch_gather(self) -> None:
        """Start the all-gather of all ranks' shards into the flat buffer."""
        self._gathering = all_gather(self.row, self.part, self.group, async_op=True)

    def wait_gather(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
