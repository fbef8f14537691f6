"""A flat parameter and its gradients: the buffers, their collectives, and this rank's shards.

Two ways to store them between micro-batches. `FullGradients` (stages 0 and 1) accumulates them in a flat buffer of full
length and reduces it once per step, in place: the shard is a slice of the buffer. `ShardedGradients` (stages 2 and 3)
keeps the gradients of a micro-batch as autograd returns them until all of the flat parameter have arrived. Then it
copies them into a full-length buffer that lives until its reduction completes, and adds the result to a shard that is
kept until the step ends. Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), section 5.2.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from minidist.comm import Group, Handle, all_gather, all_reduce, reduce_scatter
from minidist.precision.dtypes import PrecisionDtypes
from minidist.precision.masters import MasterWeights, Rounding
from minidist.zero.plan import Layout


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


class ShardedFlatParam(FlatParam):
    """A flat parameter whose full buffer is allocated only while it is unsharded (stage 3)."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.is_unsharded = True
        self.release()

    def _own(self, begin: int, end: int) -> Tensor:
        return super()._own(begin, end).clone()  # outlives the full buffer

    @torch.no_grad()
    def launch_gather(self) -> None:
        """Allocate the flat buffer and start its all-gather, unless it is gathered or in flight already."""
        if not self.is_unsharded:
            self.is_unsharded = True
            self.row.untyped_storage().resize_(self.row.numel() * self.row.element_size())
            super().launch_gather()

    def release(self) -> None:
        """Free the flat buffer's storage; the model's and autograd's views see the data of the next all-gather."""
        if self.is_unsharded:
            self.wait_gather()
            self.is_unsharded = False
            self.row.untyped_storage().resize_(0)


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


class ShardedGradients(FullGradients):
    """Gradients at full length only while in flight, and accumulated in a shard until the step ends (stages 2 and 3).

    Until a micro-batch's gradients are complete, each is kept as autograd returned it.
    row: None unless in flight. result: None before the first reduction of a step completes, and after `clear`.
    """

    transient = True

    def _allocate(self) -> None:
        self._come: dict[str, Tensor] = {}
        self.row = self.result = None

    def held(self) -> list[Tensor | None]:
        return [*self._come.values(), *super().held()]

    def add(self, name: str, grad: Tensor) -> None:
        """Accumulate a local gradient of any shape and dtype. Takes ownership: the caller must not use `grad` again."""
        if name in self._come:
            grad = self._come[name].to(self.formats.accumulate).add_(grad)
        self._come[name] = grad

    def _make_flat_gradient(self) -> Tensor:
        """Move the gradients of this micro-batch to a new flat buffer, (numel,), with zeros for missing ones."""
        row = torch.empty(self.layout.numel, dtype=self.formats.accumulate, device=self.device)
        row[row.numel() - self.layout.padding :].zero_()  # padding is sent too
        for name, slot in self.layout.slots.items():
            part, grad = row[slot.start : slot.stop], self._come.pop(name, None)
            if grad is None:
                part.zero_()
            else:
                part.view_as(grad).copy_(grad)
        return row

    def _make_shard(self) -> Tensor:
        return torch.empty(self.layout.shard, dtype=self.formats.accumulate, device=self.device)

    def launch(self) -> None:
        self.wait()
        self.row = self._reduce(self._make_flat_gradient(), self._make_shard())

    def wait(self) -> None:
        """Wait for the reduction in flight and add it to `result`."""
        if self._arriving is None:
            return
        arrived = self._arriving[2]
        super().wait()
        self.row = None
        if self.result is None:
            self.result = arrived
        elif arrived is not self.result:  # the sum over replicas is in place
            self.result.add_(arrived)

    def start_finish(self) -> None:
        self.wait()
        if self.result is None:  # the step had no micro-batch
            self.result = self._make_shard().zero_()
        self.sum_replicas()

    def clear(self) -> None:
        self.result = None
