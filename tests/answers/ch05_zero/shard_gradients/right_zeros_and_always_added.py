"""A row of zeros, and a shard that begins as zero, to which every micro-batch is added."""

import torch
from torch import Tensor

from minidist.zero.gradients import WholeGradients


class ShardGradients(WholeGradients):
    """Gradients of full length only inside the backward of a micro-batch; a shard of them for the step."""

    transient = True

    def _allocate(self) -> None:
        self.row, self.views = None, {}
        self.result = torch.zeros(self.layout.shard, dtype=self.formats.accumulate, device=self.device)
        self._first = True

    def add(self, name: str, grad: Tensor) -> None:
        if self.row is None:
            self._make_row()
        super().add(name, grad)

    def _make_row(self) -> None:
        self._set_row(torch.zeros(self.layout.numel, dtype=self.formats.accumulate, device=self.device))

    def launch(self) -> None:
        self.settle()
        if self.row is None:
            self._make_row()
        if self._first:
            self.result.zero_()
        self._reduce_into(torch.empty_like(self.result))
        self._first, self.row, self.views, self.filled = False, None, {}, set()

    def settle(self) -> None:
        """Wait for what was launched, and add it up."""
        if self._arriving is None:
            return
        arriving = self._arriving[2]
        super().settle()
        if arriving.data_ptr() != self.result.data_ptr():
            self.result += arriving

    def begin_finish(self) -> None:
        self.settle()
        if self._first:  # there was no micro-batch
            self.result.zero_()
        self.sum_copies()

    def clear(self) -> None:
        super().clear()
        self._first = True
