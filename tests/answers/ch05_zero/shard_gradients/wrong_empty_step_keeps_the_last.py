"""not_every_rank_has_every_gradient: after a step without a micro-batch the gradient of the step before is there"""

import torch
from torch import Tensor

from minidist.zero.gradients import WholeGradients


class ShardGradients(WholeGradients):
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

    def _make_row(self) -> Tensor:
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
        self.settle()
        self.row = self._reduce(self._make_row(), self._make_shard())

    def settle(self) -> None:
        """Wait for what was launched, and add it up."""
        if self._arriving is None:
            return
        arrived = self._arriving[2]
        super().settle()
        self.row = None
        if self.result is None:
            self.result = arrived
        elif arrived is not self.result:  # which sums of copies arrive in
            self.result.add_(arrived)

    def begin_finish(self) -> None:
        self.settle()
        if self.result is None:  # there was no micro-batch
            self.result = self.before
        self.sum_copies()

    def clear(self) -> None:
        self.before, self.result = self.result, None
