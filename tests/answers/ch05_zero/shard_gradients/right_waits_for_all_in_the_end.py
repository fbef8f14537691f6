"""Keeps what was launched, and adds it up when the step ends; a shard for every micro-batch waits meanwhile."""

import torch
from torch import Tensor

from minidist.zero.gradients import WholeGradients


class ShardGradients(WholeGradients):
    """Gradients of full length only inside the backward of a micro-batch; a shard of them from there to the step's end.

    result: None until the first reduction of a step has ended, and after `clear`.
    """

    transient = True

    def _allocate(self) -> None:
        self.row, self.views, self.result = None, {}, None

    def add(self, name: str, grad: Tensor) -> None:
        if self.row is None:
            self._make_row()
        super().add(name, grad)

    def _make_row(self) -> None:
        row = torch.empty(self.layout.numel, dtype=self.formats.accumulate, device=self.device)
        row[row.numel() - self.layout.padding :].zero_()  # what nobody reads is sent all the same
        self._set_row(row)

    def _make_shard(self) -> Tensor:
        return torch.empty(self.layout.shard, dtype=self.formats.accumulate, device=self.device)

    def launch(self) -> None:
        self.settle()
        if self.row is None:
            self._make_row()
        for name, view in self.views.items():
            if name not in self.filled:
                view.fill_(0)
        if self.result is None:
            self.result, self.flying = torch.zeros_like(self._make_shard()), []
        self._reduce_into(torch.empty_like(self.result))
        self.flying.append(self._arriving)
        self.row, self.views, self.filled = None, {}, set()

    def settle(self) -> None:
        """Wait for what was launched, and add it up."""
        if self._arriving is None:
            return
        if self._arriving[2] is self.result:  # the sum over copies
            super().settle()
            return
        for handle, arrived, _ in self.flying:
            handle.wait()
            self.result.add_(arrived)
        self._arriving, self.flying = None, []

    def begin_finish(self) -> None:
        self.settle()
        if self.result is None:  # there was no micro-batch
            self.result = self._make_shard().zero_()
        self.sum_copies()

    def clear(self) -> None:
        super().clear()
        self.result = None
