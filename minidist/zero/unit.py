"""One row of parameters that ranks share out: its memory, and what the optimizer sees of it."""

from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from minidist.comm import Group, Handle, all_gather
from minidist.precision.formats import Formats
from minidist.zero.layout import Layout


class Rounding(Protocol):
    """Rounds what an update gave, (n,), into a parameter's elements, (n,), of a narrower format."""

    def __call__(self, values: Tensor, into: Tensor, step: int, name: str) -> None: ...


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


class ShardedUnit(Unit):
    """A row that has memory only while somebody needs it (stage 3)."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.part = self.part.clone()
        if not self.separate:
            self.master = self.part
            self.masters = self.stored()
        self.is_whole = True
        self.release()

    @torch.no_grad()
    def launch_gather(self) -> None:
        """Start to fill the row, unless it is full or about to be."""
        if not self.is_whole:
            self.is_whole = True
            self.row.untyped_storage().resize_(self.row.numel() * self.row.element_size())
            super().launch_gather()

    def release(self) -> None:
        """Give the row's memory back. What views it, the model and autograd's graph, finds the next content there."""
        if self.is_whole:
            self.wait_gather()
            self.is_whole = False
            self.row.untyped_storage().resize_(0)
