"""What a contender holds at its peak, seen from outside and in the same way for all. One contender per fresh launch.

Two figures. *Tensors*: the live tensor storages, from torch's own allocator, which reports every storage whoever holds
it, Python or C++ (the buckets of DDP, say), and so gives the exact peak; plus this rank's shared-memory segments
(memfd and /dev/shm), where a backend may keep tensors that torch did not allocate. *Resident*: the growth of the
process's proportional set size (PSS), sampled; it sees the rest as well, such as gloo's buffers and imported code.
Storages allocated by another thread than the one that trains are not seen by the first figure; none of the contenders
has any.
"""

import gc
import threading
from collections.abc import Callable
from pathlib import Path

from bench.contenders import Contender, ContenderContext
from bench.rounds import WARM_UP_STEPS
from bench.workload import Workload
from minidist.comm import World
from minidist.tools.memory.storages import StoragePeak, shared_segment_bytes

MEASURED_STEPS = 3
_SELF = Path("/proc/self")


class ResidentPeak:
    """Context that samples this process's PSS from a thread; `bytes` is the largest, None where the system has none."""

    def __enter__(self) -> "ResidentPeak":
        self.bytes, self._stop = pss_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while self.bytes is not None and not self._stop.wait(0.002):
            self.bytes = max(self.bytes, pss_bytes())

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()


def pss_bytes() -> int | None:
    """Proportional set size of this process: private pages, and shared ones divided by those who share them."""
    try:
        return _kib((_SELF / "smaps_rollup").read_text(), "Pss")
    except OSError:
        return None


def _kib(text: str, key: str) -> int:
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{key}:")) * 1024


def tensor_peak(world: World, make: Callable[[ContenderContext], Contender], work: Workload, mode: str) -> int:
    """Bytes of live storages and shared-memory segments at the peak after warm-up, of one contender on this rank."""
    shares, segments = work.batches(world.rank, world.size), shared_segment_bytes()
    with StoragePeak() as peak:
        contender = make(ContenderContext(work, mode, world))
        for share in shares[:WARM_UP_STEPS]:
            contender.step(share)
        peak.reset_peak()
        for share in shares[:MEASURED_STEPS]:
            contender.step(share)
    return peak.bytes + shared_segment_bytes() - segments


def resident_peak(world: World, make: Callable[[ContenderContext], Contender], work: Workload, mode: str) -> int | None:
    """Bytes by which the process had grown at the peak of a step after warm-up, from before the contender was made."""
    shares = work.batches(world.rank, world.size)
    gc.collect()
    before = pss_bytes()
    contender = make(ContenderContext(work, mode, world))
    for share in shares[:WARM_UP_STEPS]:
        contender.step(share)
    with ResidentPeak() as peak:
        for share in shares[:MEASURED_STEPS]:
            contender.step(share)
    return None if before is None else peak.bytes - before
