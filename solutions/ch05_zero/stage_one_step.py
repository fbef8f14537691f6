"""Reduce, update a shard, gather: the solution, as it stands in minidist.zero.gradients and minidist.zero.unit.

An all-reduce is a reduce-scatter and an all-gather. Stage 1 puts the update between the two: reduce-scatter the
gradients, update one shard, all-gather the parameters. As many bytes as before, and each rank keeps a part of what
the optimizer remembers.

Usual wrong answers:
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from minidist.comm import Group, Handle, all_gather, all_reduce, reduce_scatter
from minidist.precision.formats import Formats
from minidist.zero.layout import Layout
from minidist.zero.unit import Rounding


class WholeGradients:
    """Gradients of full length for the whole step.

    group: ranks that share out the row; outer: ranks that hold the same shard, whose gradients belong to the same sum.
    filled: the parameters that have a gradient now. result: this rank's shard, its sum over all ranks after `finish`.
    transient: whether a row of full length lives only from its first gradient to the end of its reduction.
    """

    transient = False

    def __init__(self, layout: Layout, group: Group, outer: Group | None, formats: Formats, device: torch.device):
        self.layout, self.group, self.outer, self.formats, self.device = layout, group, outer, formats, device
        self.filled: set[str] = set()
        self._arriving: tuple[Handle, Tensor, Tensor] | None = None  # on its way, from where, and where it belongs
        self._allocate()

    def _allocate(self) -> None:
        self._set_row(torch.zeros(self.layout.numel, dtype=self.formats.accumulate, device=self.device))
        self.result = self.row[slice(*self.layout.bounds(self.group.rank))]

    def _set_row(self, row: Tensor) -> None:
        self.row = row
        self.views = {name: row[slot.start : slot.stop] for name, slot in self.layout.slots.items()}

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
            self._reduce_into(self.result)
        else:  # nothing is shared out: those that hold the same sum the whole row
            self.sum_copies()

    def _reduce_into(self, target: Tensor) -> None:
        """Start the reduction of the row, over copies in the format of the wire where that is another one."""
        row, output = self.row, target
        if self.formats.reduce != self.formats.accumulate:
            row, output = row.to(self.formats.reduce), torch.empty_like(target, dtype=self.formats.reduce)
        self._arriving = reduce_scatter(output, row, self.group, async_op=True), output, target

    def sum_copies(self) -> None:
        """Start the sum of shards over the ranks that hold the same."""
        if self.outer is not None:
            sent = self.result.to(self.formats.reduce)  # itself, where the format is the same
            self._arriving = all_reduce(sent, self.outer, async_op=True), sent, self.result

    def settle(self) -> None:
        """Wait for what was launched; the result has it then."""
        if self._arriving is not None:
            handle, arrived, target = self._arriving
            handle.wait()
            if arrived is not target:
                target.copy_(arrived)
            self._arriving = None

    def begin_finish(self) -> None:
        """What is left when every reduction over the group was launched."""
        if self.group.size > 1:
            self.settle()
            self.sum_copies()

    def clear(self) -> None:
        """Forget the step."""
        self.filled.clear()

    def abandon(self) -> None:
        """The same, of a step that was broken off: what is on its way keeps its memory."""
        self._arriving = None
        self.clear()
        self._allocate()


class Unit:
    """Parameters in one row of memory, of which this rank keeps a shard.

    parameters: of the model, which from now on are views of the row; values: what they are in full precision.
    group: the ranks that share out the row. host: whether masters lie in the host's memory, where the update runs.
    rounding: where masters do not last, how their elements come back to the parameters.
    row: (numel,), what forward and backward read. part: (shard,), this rank's piece of it. master: (shard,), what the
    optimizer updates; the part itself, unless masters are a copy of their own. masters: of each parameter that the
    shard has elements of, those elements, in one dimension.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        values: Mapping[str, Tensor],
        layout: Layout,
        group: Group,
        formats: Formats,
        host: bool = False,
        rounding: Rounding | None = None,
    ):
        self.parameters, self.layout, self.group, self.formats = dict(parameters), layout, group, formats
        self._rounding = rounding
        begin, end = layout.bounds(group.rank)
        self.bounds = {  # of each parameter's elements in the shard
            name: (layout.slots[name].start + start - begin, layout.slots[name].start + stop - begin)
            for name, (start, stop) in layout.held(group.rank).items()
        }
        device = next(iter(parameters.values())).device
        self.row = torch.zeros(layout.numel, dtype=formats.parameter, device=device)
        self.part = self.row[begin:end]
        for name, parameter in parameters.items():
            view = self.row[layout.slots[name].start : layout.slots[name].stop].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
        self._gathering: Handle | None = None
        self._make_masters(values, host)

    def _make_masters(self, values: Mapping[str, Tensor], host: bool) -> None:
        wide = self.formats.master or self.formats.state
        self.separate = host or wide != self.formats.parameter
        self.lasting = self.formats.master is not None  # else masters are there only while they are updated
        self.master = self.part
        if self.separate:
            self.master = torch.zeros_like(self.part, dtype=wide, device="cpu" if host else self.part.device)
        self.masters = {name: self.master[start:stop] for name, (start, stop) in self.bounds.items()}
        for name, (start, stop) in self.layout.held(self.group.rank).items():
            if self.separate:
                self.masters[name].copy_(values[name].reshape(-1)[start:stop])
        if not self.lasting:
            self.master.untyped_storage().resize_(0)

    def stored(self) -> dict[str, Tensor]:
        """The elements of each parameter that this rank keeps, as exact as it has them."""
        source = self.master if self.lasting else self.part
        return {name: source[start:stop] for name, (start, stop) in self.bounds.items()}

    # -- update -------------------------------------------------------------------------------------------------------

    def needs_room(self, gradients: Tensor) -> bool:
        """Whether an update takes memory of its own, which one unit after another can share."""
        return not self.lasting or (gradients.dtype, gradients.device) != (self.master.dtype, self.master.device)

    def open(self, gradients: Tensor, unused: Collection[str] = ()) -> None:
        """Before an update: give every master its gradient out of `gradients` (shard,), in the format of the update."""
        if not self.lasting:
            self.master.untyped_storage().resize_(self.master.numel() * self.master.element_size())
            self.master.copy_(self.part)
        gradients = gradients.to(self.master)  # itself, where format and device are the same
        for name, (start, stop) in self.bounds.items():
            if name not in unused:
                self.masters[name].grad = gradients[start:stop]

    @torch.no_grad()
    def publish(self, step: int = 0) -> None:
        """Bring the updated masters to this rank's part of the row. step: of the optimizer."""
        if self.separate and self.lasting:
            self.part.copy_(self.master)
        elif self.separate:
            for name, (start, stop) in self.bounds.items():
                self._rounding(self.masters[name], self.part[start:stop], step, name)

    def close(self) -> None:
        """After an update: give back what it took."""
        for master in self.masters.values():
            master.grad = None
        if not self.lasting:
            self.master.untyped_storage().resize_(0)

    # -- gather -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def launch_gather(self) -> None:
        """Start to fill the row with the parts of all ranks."""
        self._gathering = all_gather(self.row, self.part, self.group, async_op=True)

    def wait_gather(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
