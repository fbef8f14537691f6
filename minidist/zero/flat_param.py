"""One row of parameters that ranks share out: its memory, and what the optimizer sees of it."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from minidist.comm import Group, Handle, all_gather
from minidist.precision.dtypes import Formats
from minidist.precision.masters import Masters, Rounding
from minidist.zero.layout import Layout


class FlatParam:
    """Parameters in one row of memory, of which this rank keeps a shard.

    parameters: of the model, which from now on are views of the row; values: what they are in full precision.
    group: the ranks that share out the row. host, rounding: as `Masters` has them.
    row: (numel,), what forward and backward read. part: (shard,), this rank's piece of it. masters: what the optimizer
    updates of that piece. bounds: which elements of the shard are a parameter's, by name; others' are elsewhere.
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
        self.masters = Masters(self.part, self.bounds, mine, formats, host, rounding)
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
