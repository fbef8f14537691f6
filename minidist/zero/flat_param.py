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
    """Parameters in one row of memory, of which this rank keeps a shard.

    parameters: of the model, which from now on are views of the row; values: what they are in full precision.
    group: the ranks that share out the row. host, rounding: as `MasterWeights` has them.
    row: (numel,), what forward and backward read. part: (shard,), this rank's piece of it. masters: what the optimizer
    updates of that piece. bounds: which elements of the shard are a parameter's, by name; others' are elsewhere.
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
        held = layout.held(group.rank)  # of each parameter, counted from its own first element
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
        """This rank's piece of the row, (end - begin,)."""
        return self.row[begin:end]

    @torch.no_grad()
    def launch_gather(self) -> None:
        """Start to fill the row with the parts of all ranks."""
        self._gathering = all_gather(self.row, self.part, self.group, async_op=True)

    def wait_gather(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None


class ShardedFlatParam(FlatParam):
    """A row that has memory only while somebody needs it (stage 3)."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.is_unsharded = True
        self.release()

    def _own(self, begin: int, end: int) -> Tensor:
        return super()._own(begin, end).clone()  # it stays when the row has no memory

    @torch.no_grad()
    def launch_gather(self) -> None:
        """Start to fill the row, unless it is full or about to be."""
        if not self.is_unsharded:
            self.is_unsharded = True
            self.row.untyped_storage().resize_(self.row.numel() * self.row.element_size())
            super().launch_gather()

    def release(self) -> None:
        """Give the row's memory back. What views it, the model and autograd's graph, finds the next content there."""
        if self.is_unsharded:
            self.wait_gather()
            self.is_unsharded = False
            self.row.untyped_storage().resize_(0)


class FullGradients:
    """Gradients of full length for the whole step.

    group: ranks that share out the row; outer: ranks that hold the same shard, whose gradients belong to the same sum.
    row: (numel,), all of them. result: this rank's shard, its sum over all ranks when the reducer has finished.
    transient: whether a row of full length lives only while it is reduced.
    """

    transient = False

    def __init__(
        self, layout: Layout, group: Group, outer: Group | None, formats: PrecisionDtypes, device: torch.device
    ):
        self.layout, self.group, self.outer, self.formats, self.device = layout, group, outer, formats, device
        self._arriving: tuple[Handle, Tensor, Tensor] | None = None  # on its way, from where, and where it belongs
        self._allocate()

    def _allocate(self) -> None:
        self.row = torch.zeros(self.layout.numel, dtype=self.formats.accumulate, device=self.device)
        self.views = {name: self.row[slot.start : slot.stop] for name, slot in self.layout.slots.items()}
        self.filled: set[str] = set()  # the parameters that have a gradient now
        self.result = self.row[slice(*self.layout.bounds(self.group.rank))]

    def held(self) -> list[Tensor | None]:
        """What it has now, for who measures memory."""
        return [self.row, self.result]

    def add(self, name: str, grad: Tensor) -> None:
        """One contribution of this rank to the gradient of a parameter, of any shape and format."""
        view = self.views[name].view_as(grad)
        if name in self.filled:
            view.add_(grad)
        else:
            view.copy_(grad)
            self.filled.add(name)

    def launch(self) -> None:
        """Start the reduction of what has come; a gradient that did not come counts as zero."""
        for name in self.views.keys() - self.filled:
            self.views[name].zero_()
        if self.group.size > 1:
            self._reduce(self.row, self.result)
        else:  # nothing is shared out: those that hold the same sum the whole row
            self.sum_replicas()

    def _reduce(self, row: Tensor, target: Tensor) -> Tensor:
        """Start the reduction of a row, over copies in the format of the wire where that is another one. Returns what
        is sent."""
        output = target
        if self.formats.reduce != self.formats.accumulate:
            row, output = row.to(self.formats.reduce), torch.empty_like(target, dtype=self.formats.reduce)
        self._arriving = reduce_scatter(output, row, self.group, async_op=True), output, target
        return row

    def sum_replicas(self) -> None:
        """Start the sum of shards over the ranks that hold the same."""
        if self.outer is not None:
            sent = self.result.to(self.formats.reduce)  # itself, where the format is the same
            self._arriving = all_reduce(sent, self.outer, async_op=True), sent, self.result

    def wait(self) -> None:
        """Wait for what was launched; the result has it then."""
        if self._arriving is not None:
            handle, arrived, target = self._arriving
            handle.wait()
            if arrived is not target:
                target.copy_(arrived)
            self._arriving = None

    def start_finish(self) -> None:
        """What is left when every reduction over the group was launched."""
        if self.group.size > 1:
            self.wait()
            self.sum_replicas()

    def clear(self) -> None:
        """Forget the step."""
        self.filled.clear()

    def abandon(self) -> None:
        """The same, of a step that was broken off: what is on its way keeps its memory."""
        self._arriving = None
        self.clear()
        self._allocate()


class ShardedGradients(FullGradients):
    """Gradients of full length only while a micro-batch's are sent; a shard of them from there to the step's end.

    A gradient is kept as it came, and in its own format, until all of the row are there.
    row: None but while it is on its way. result: None until the first reduction of a step has ended, and after `clear`.
    """

    transient = True

    def _allocate(self) -> None:
        self._come: dict[str, Tensor] = {}
        self.row = self.result = None

    def held(self) -> list[Tensor | None]:
        return [*self._come.values(), *super().held()]

    def add(self, name: str, grad: Tensor) -> None:
        """One contribution of this rank, of any shape and format; it is kept as it is, and no longer the caller's."""
        if name in self._come:
            grad = self._come[name].to(self.formats.accumulate).add_(grad)
        self._come[name] = grad

    def _make_flat_gradient(self) -> Tensor:
        """What has come, (numel,), which is forgotten; zero where nothing has."""
        row = torch.empty(self.layout.numel, dtype=self.formats.accumulate, device=self.device)
        row[row.numel() - self.layout.padding :].zero_()  # what nobody reads is sent all the same
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
        """Wait for what was launched, and add it up."""
        if self._arriving is None:
            return
        arrived = self._arriving[2]
        super().wait()
        self.row = None
        if self.result is None:
            self.result = arrived
        elif arrived is not self.result:  # which sums of copies arrive in
            self.result.add_(arrived)

    def start_finish(self) -> None:
        self.wait()
        if self.result is None:  # there was no micro-batch
            self.result = self._make_shard().zero_()
        self.sum_replicas()

    def clear(self) -> None:
        self.result = None
