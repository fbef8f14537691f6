"""Peak memory of one contender per rank, measured in the same way for all contenders, each in fresh processes.

Two measurements. *Tensors*: the live tensor storages as torch's own allocator reports them, whether Python or C++ owns
them (DDP's buckets, for example), so that the peak is exact; plus this rank's shared-memory segments (memfd and
/dev/shm), where a backend may keep tensors that torch did not allocate. *Resident*: the growth of the process's
proportional set size (PSS), sampled every 2 ms; it includes gloo's buffers and imported code as well. The tensor peak
does not include storages that a thread other than the training thread allocates; no contender has such storages.
"""

import gc
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.contenders import Contender, ContenderContext
from bench.time_contenders import WARM_UP_STEPS, Trainable
from bench.workload import Workload
from minidist.comm import World
from minidist.tools.memory.storages import StoragePeak, shared_segment_bytes

MEASURED_STEPS = 3
_SMAPS = Path("/proc/self/smaps_rollup")


class PeakResidentMemory:
    """Context manager that samples this process's PSS in a thread; `bytes` is the peak, None if unknown."""

    def __enter__(self) -> "PeakResidentMemory":
        self.bytes, self._stop = read_pss_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stopped)
        self._thread.start()
        return self

    def _sample_until_stopped(self) -> None:
        """Sample the PSS every 2 ms, in a thread of its own."""
        while self.bytes is not None and not self._stop.wait(0.002):
            self.bytes = max(self.bytes, read_pss_bytes())

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()


def read_pss_bytes() -> int | None:
    """Return this process's proportional set size in bytes; None where the system does not report it.

    PSS counts private pages in full and each shared page divided by the number of processes that map it.
    """
    try:
        lines = _SMAPS.read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


def measure_tensor_peak(world: World, make: Callable[[ContenderContext], Contender], work: Workload, mode: str) -> int:
    """Return this rank's peak of live tensor storages and shared-memory segments in bytes, after warm-up.

    make: builds the contender. mode: "full" or "bare" (see `contenders`).
    """
    batches = work.rank_batches(world.rank, world.size)
    return measure_peak_of_steps(lambda: make(ContenderContext(work, mode, world)), batches)


def measure_peak_of_steps(build: Callable[[], Trainable], batches: Sequence) -> int:
    """Return the peak in bytes, as `measure_tensor_peak` does, of any contender that trains on `batches`.

    build: builds the contender, whose model and optimizer states are counted, too.
    """
    segments_before = shared_segment_bytes()
    with StoragePeak() as peak:
        contender = build()
        for batch in batches[:WARM_UP_STEPS]:
            contender.step(batch)
        peak.reset_peak()
        for batch in batches[:MEASURED_STEPS]:
            contender.step(batch)
    return peak.bytes + shared_segment_bytes() - segments_before


def measure_resident_growth(
    world: World, make: Callable[[ContenderContext], Contender], work: Workload, mode: str
) -> int | None:
    """Return the peak growth of this rank's PSS in bytes, relative to the PSS before the contender was built.

    Arguments as in `measure_tensor_peak`.
    """
    batches = work.rank_batches(world.rank, world.size)
    gc.collect()
    before = read_pss_bytes()
    contender = make(ContenderContext(work, mode, world))
    for batch in batches[:WARM_UP_STEPS]:
        contender.step(batch)
    with PeakResidentMemory() as peak:
        for batch in batches[:MEASURED_STEPS]:
            contender.step(batch)
    return None if before is None else peak.bytes - before
