"""The observer and the meter that inject a fault when the run of this rank comes to its phase."""

import contextlib
import errno
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from minidist.tools.chaos.faults import SLOW_S, Fault
from minidist.tools.trace.timed_meter import TimedMeter
from minidist.train.observer import Observer
from minidist.train.trainer import Trainer

# The spans of the trainer that begin a phase of the step.
_PHASE_OF_SPAN = {
    "forward": "forward",
    "backward": "backward",
    "reduce": "reduce",
    "gradient norm": "agree",
    "optimizer": "update",
    "gather": "gather",
}
_FLIPPED_BIT = 4  # from the top of an element: an exponent bit, so that the value changes by a power of two


class FaultInjector(Observer):
    """Observer that injects a fault into this rank when its step and phase begin, if this is the fault's rank.

    A fault is injected once; "slow" is injected from its step to the end of the run. meter: the traffic meter that the
    run must use; it notices where phases begin.
    """

    def __init__(self, fault: Fault):
        self.meter = _InjectingMeter(self)
        self._fault, self._trainer, self._step, self._injected = fault, None, 0, False

    def on_start(self, trainer: Trainer) -> None:
        """Called when the trainer is built: on the fault's rank, start watching the trainer's steps and saves."""
        if trainer.world.rank == self._fault.rank:
            self._trainer = trainer
            trainer.saver.on_phase = self._on_phase

    def on_end(self, trainer: Trainer, summary: dict[str, Any]) -> None:
        """Print a line if the run has ended without the fault, because it never came to the fault's step and phase."""
        if self._trainer is not None and not self._injected:
            self._print(f"{self._fault}: this run never came there")

    def on_span(self, name: str, attributes: dict[str, Any]) -> None:
        """Inject the fault if the span `name`, which begins now, is the fault's phase in its step.

        The meter of this injector calls it. The fault may kill or stop this process. attributes: of the span; "step"
        has the step's number.
        """
        if name == "step":
            self._step = attributes["step"]
        elif name in _PHASE_OF_SPAN:
            self._on_phase(_PHASE_OF_SPAN[name], self._step)

    def _on_phase(self, phase: str, step: int) -> None:
        """Inject the fault if `phase` of step number `step` is its phase and its time has come."""
        fault, engine = self._fault, self._trainer and self._trainer.engine
        if engine is None or phase != fault.phase or step < fault.step or (self._injected and fault.kind != "slow"):
            return
        if not self._injected:
            self._print(f"injecting: {fault}")
        self._injected = True
        if (fault.kind, fault.phase) == ("nan", "backward"):
            self._poison_backward(engine.parameters)
        else:
            # Where a server has the masters, the other ranks have parameters only.
            execute_fault(
                fault, lambda: engine.reducer.checkpoint_tensors() or engine.parameters, engine.reducer.gradients
            )

    def _poison_backward(self, parameters: dict[str, Any]) -> None:
        """Make the gradient of a parameter NaN as soon as the backward that begins here has computed it."""
        parameter = next(p for p in reversed(parameters.values()) if p.requires_grad)
        hook = parameter.register_hook(lambda gradient: hook.remove() or gradient * float("nan"))

    def _print(self, line: str) -> None:
        """Print a line on stderr, with this rank in front."""
        print(f"rank {self._fault.rank}: {line}", file=sys.stderr, flush=True)


class _InjectingMeter(TimedMeter):
    """A meter that tells a `FaultInjector` when a span of the trainer begins."""

    def __init__(self, injector: FaultInjector):
        super().__init__()
        self._injector = injector

    def span(self, name: str, **attributes: Any) -> contextlib.AbstractContextManager:
        """Report the begin of the span to the injector; then record it as `TimedMeter` does."""
        self._injector.on_span(name, attributes)
        return super().span(name, **attributes)


def execute_fault(
    fault: Fault,
    parameters: Callable[[], Mapping[str, Tensor]],
    gradients: Callable[[], Mapping[str, Tensor | None]],
) -> None:
    """Make a fault happen in this process now: kill or stop it, sleep, change a tensor, or raise.

    parameters, gradients: return this rank's tensors by name; "flip" changes a parameter and "nan" a gradient. Raises
    OSError for a full disk.
    """
    if fault.kind in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
    elif fault.kind == "slow":
        time.sleep(SLOW_S)
    elif fault.kind == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif fault.kind == "flip":
        flip_bit_of_first_element(_largest_tensor(parameters()))
    else:
        _largest_tensor(gradients()).view(-1)[0] = math.nan


def flip_bit_of_first_element(tensor: Tensor, bit_from_highest: int = _FLIPPED_BIT) -> None:
    """Flip one bit of the first element of a contiguous tensor, in place. bit_from_highest: 0 is the sign bit."""
    element_bytes = tensor.data.view(-1)[:1].view(torch.uint8)
    element_bytes[-1 - bit_from_highest // 8] ^= (
        0x80 >> bit_from_highest % 8
    )  # in memory, the byte with the sign is the last


def _largest_tensor(tensors: Mapping[str, Tensor | None]) -> Tensor:
    """Return the tensor with the most elements, without its autograd history; None entries are skipped."""
    # `.data`: unlike one through `detach`, a change of memory that autograd does not notice, as faults are
    return max((t.data for t in tensors.values() if t is not None), key=lambda tensor: tensor.numel())
