"""no_row_stays: the shard stays when the step is over, and is emptied for the next"""

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
        if self.row is None:  # no gradient came on this rank; others wait for its part all the same
            self._make_row()
        for name in self.views.keys() - self.filled:
            self.views[name].zero_()
        self._reduce_into(self._make_shard())
        self.row, self.views, self.filled = None, {}, set()  # the next micro-batch's are others

    def settle(self) -> None:
        """Wait for what was launched, and add it up."""
        if self._arriving is None:
            return
        arrived = self._arriving[2]
        super().settle()
        if self.result is None:
            self.result = arrived
        elif arrived is not self.result:  # which sums of copies arrive in
            self.result.add_(arrived)

    def begin_finish(self) -> None:
        self.settle()
        if self.result is None:  # there was no micro-batch
            self.result = self._make_shard().zero_()
        self.sum_copies()

    def clear(self) -> None:
        super().clear()
        if self.result is not None:
            self.result.zero_()
