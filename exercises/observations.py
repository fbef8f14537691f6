"""Observe an answer's order of events, peak memory and device placement, independently of the machine's speed."""

import contextlib
import gc
import itertools
import math
import os
import tracemalloc
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from exercises.testing import Wrong
from minidist.tools.recording_backend import is_backend_reference


def timeline(network) -> list[str]:
    """Return the events of this rank since the test began, in order.

    Events are the test's marks (`network.event`), `launch 0`, `launch 1`, ... for the operations in launch order, and
    `wait 0`, `wait 1`, ... where the wait for each of them ended. A group of one rank launches nothing.
    """
    ticks = list(network.events)
    for number, record in enumerate(network.records):
        ticks.append((record.launched, f"launch {number}"))
        if record.waited is not None:
            ticks.append((record.waited, f"wait {number}"))
    return [label for _, label in sorted(ticks)]


def expect_order(happened: Sequence[str], expected: Sequence[str]) -> None:
    """Fail unless the events are exactly the expected ones, in order; the message names the first difference."""
    before = "the beginning"
    for got, wanted in itertools.zip_longest(happened, expected, fillvalue="nothing more"):
        if got != wanted:
            raise Wrong("wrong", f"what happens after: {before}", wanted, got)
        before = wanted


class DeviceMoveTracker(TorchFunctionMode):
    """Tracks which tensors were moved to `device` in a `with` block, or computed from such: `tensor in tracker`.

    The device is an alias of the CPU, to test that a program uses the given device on a machine without GPUs. It is
    also the `.device` of these tensors.
    """

    device = torch.device("cpu", 1)

    def __init__(self):
        super().__init__()
        self._storages = {}  # by address, as .to() may return the tensor itself

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._storages

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function == Tensor.device.__get__ and args[0] in self:
            return self.device
        result = function(*args, **(kwargs or {}))
        inputs = tree_leaves((args, kwargs))
        if any(isinstance(each, Tensor) and each in self or self._is_device(each) for each in inputs):
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.numel():
                    storage = tensor.untyped_storage()
                    self._storages[storage.data_ptr()] = storage  # referenced, so that no other tensor gets its address
        return result

    def _is_device(self, value) -> bool:
        """Return whether the value names the tracked device."""
        return isinstance(value, str | torch.device) and str(value) == str(self.device)


class PeakMemory:
    """CPU memory allocated for tensors inside a `with` block, beyond that before it: `peak_bytes` and `kept_bytes`.

    kept_bytes: what is still allocated at the end of the block, such as results and tensors saved for backward.
    Counted by torch's own allocator, so that tensors inside autograd and operators count too. Memory
    that was allocated before and is freed inside is subtracted.
    """

    peak_bytes = kept_bytes = 0

    def __enter__(self) -> "PeakMemory":
        self._profile = profiler.profile(profile_memory=True)
        with _silent():
            self._profile.__enter__()
        return self

    def __exit__(self, *error) -> None:
        with _silent():
            self._profile.__exit__(*error)
        events = self._profile.kineto_results.events()
        for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda e: e.start_ns()):
            self.kept_bytes += event.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.kept_bytes)


class LiveTensorMemory:
    """Memory of the live tensors created inside a `with` block: `memory.nbytes()`, each storage counted once.

    Counts what Python references, without cyclic garbage, and not what only the thread of a communication backend still
    references: either is freed at a random time, later on a busy machine.
    """

    def __enter__(self) -> "LiveTensorMemory":
        gc.collect()
        gc.freeze()
        return self

    def __exit__(self, *error) -> None:
        gc.unfreeze()

    def nbytes(self) -> int:
        """Return the bytes of the live tensors created inside the block, each storage counted once."""
        gc.collect()
        tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
        storages = [each.untyped_storage() for each in tensors if not is_backend_reference(each)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class PythonMemory:
    """Memory that Python objects created inside a `with` block still use: `memory.nbytes()`; that of tensors excluded.

    Leaves out what an import allocated. The first step of an optimizer, for example, imports megabytes of torch's code,
    unless something in this process did so before.
    """

    _FRAMES = 25  # of the call stack of an allocation; an import is among them
    _IMPORTS = tracemalloc.Filter(False, "<frozen importlib*", all_frames=True)

    def __enter__(self) -> "PythonMemory":
        tracemalloc.start(self._FRAMES)
        return self

    def __exit__(self, *error) -> None:
        tracemalloc.stop()

    def nbytes(self) -> int:
        """Return the bytes that Python objects created inside the block use, without those of imported modules."""
        traces = tracemalloc.take_snapshot().filter_traces([self._IMPORTS]).traces
        return sum(trace.size for trace in traces)


def count_flops() -> FlopCounterMode:
    """Return a context manager that counts floating-point operations, also of products that torch's own leaves out."""
    aten = torch.ops.aten
    return FlopCounterMode(display=False, custom_mapping={aten.addbmm: _addbmm_flops, aten.addr: _addr_flops})


def _addbmm_flops(_, batch1, batch2, *args, **kwargs) -> int:
    """Return the FLOPs of torch.addbmm, from the shapes of its arguments."""
    return 2 * math.prod(batch1) * batch2[-1]


def _addr_flops(_, column, row, *args, **kwargs) -> int:
    """Return the FLOPs of torch.addr, from the shapes of its arguments."""
    return 2 * column[0] * row[0]


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Silence the profiler's messages on stderr, which a learner would take for the output of the code."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
