"""A request to stop, where replicas train separately and do not meet in every step.

Between merges the ranks exchange whether one of them was asked to stop, in a small all-reduce in the background: it is
launched after a step and waited for some steps later, when it has long ended unless a replica is that far behind. So no
replica waits for another one in every step, and all ranks learn of the request after the same step.
"""

import time
from dataclasses import replace

import torch
from torch import Tensor

from minidist.comm import Group, Handle, Meter, all_reduce

_PERIOD_S = 1.0


class StopCheck:
    """Agrees with the other ranks on a stop while they train separately.

    After a request, all ranks stop after the same step: at the second check that follows, so within two periods, and
    two steps if a step takes longer than a period. group: all ranks. Its collectives are not in the run's meter: how
    many there are depends on time, and the bytes of a run must not.
    """

    def __init__(self, group: Group):
        self._group = replace(group, meter=Meter(keep=False))
        self._pending: tuple[Handle, Tensor] | None = None
        self._next_step: int | None = None
        self._last_step, self._last_time_s = 0, 0.0

    def is_stop_agreed(self, step: int, is_requested: bool) -> bool:
        """Collective, after every step: return whether all ranks stop now. It communicates in few of the steps only.

        step: number of completed steps. is_requested: whether this rank was asked to stop.
        """
        if self._next_step is not None and step < self._next_step:
            return False
        now_s, num_steps = time.monotonic(), 1
        if self._next_step is not None:
            step_s = (now_s - self._last_time_s) / (step - self._last_step)
            num_steps = max(1.0, _PERIOD_S / max(step_s, 1e-6))
        stops, mean_steps = self.finish()
        self._last_step, self._last_time_s = step, now_s
        self._next_step = step + round(mean_steps)
        if not stops:
            values = torch.tensor([float(is_requested), num_steps], dtype=torch.float64)
            values = values.to(self._group.world.control_device)
            self._pending = all_reduce(values, self._group, async_op=True), values
        return stops > 0

    def finish(self) -> tuple[float, float]:
        """Wait for the all-reduce in flight; return how many ranks were asked to stop, and the steps to the next check.

        The steps are the mean over the ranks of those that take a period, so all ranks check after the same steps.
        """
        if self._pending is None:
            return 0.0, 1.0
        handle, values = self._pending
        self._pending = None
        handle.wait(host=True)
        stops, num_steps = values.tolist()
        return stops, num_steps / self._group.size
