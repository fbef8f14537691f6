"""What a contender holds at its peak, seen from outside and in the same way for all. One contender per fresh launch.

Two figures. *Tensors*: the live tensor storages, from torch's own allocator, which reports every storage whoever holds
it, Python or C++ (the buckets of DDP, say), and so gives the exact peak; plus this rank's part of the mapped segments
(memfd and /dev/shm), where a backend may keep tensors that torch did not allocate. *Resident*: the growth of the
process's proportional set size (PSS), sampled; it sees the rest as well, such as gloo's buffers and imported code.
Storages allocated by another thread than the one that trains are not seen by the first figure; none of the contenders
has any.
"""

import gc
import threading
from pathlib import Path

import torch

from bench.contenders import Seat
from bench.lineup import LINEUP
from bench.rounds import WARM_UP_STEPS
from bench.workload import Workload
from minidist.comm import World

MEASURED_STEPS = 3
_SELF = Path("/proc/self")
_SEGMENTS = ("/memfd:", "/dev/shm/")


class StoragePeak:
    """Context in which every allocation of a CPU tensor is recorded; `mark()` begins the part whose peak counts.

    `bytes` afterwards: the most that was live at one time since the mark, of what was allocated in the context.
    """

    _MARK = "bench: from here on"

    def __enter__(self) -> "StoragePeak":
        self._profiler = torch.autograd.profiler.profile(profile_memory=True)
        self._profiler.__enter__()
        return self

    def mark(self) -> None:
        with torch.profiler.record_function(self._MARK):
            pass

    def __exit__(self, *exception) -> None:
        self._profiler.__exit__(*exception)
        events = sorted(self._profiler.kineto_results.events(), key=lambda event: event.start_ns())
        live, self.bytes, counts = 0, 0, False
        for event in events:
            if event.name() == self._MARK:
                counts = True
            elif event.name() == "[memory]":
                live += event.nbytes()  # negative when freed
            if counts:
                self.bytes = max(self.bytes, live)


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


def segment_bytes() -> int:
    """This process's part (PSS) of the shared segments that it has mapped; 0 where /proc does not tell."""
    try:
        lines = (_SELF / "smaps").read_text().splitlines()
    except OSError:
        return 0
    total, inside = 0, False
    for line in lines:
        head = line.split(maxsplit=5)
        if not head[0].endswith(":"):  # "7f..-7f.. rw-s 00000000 00:01 1035 /memfd:name (deleted)"
            inside = head[1].endswith("s") and len(head) == 6 and head[5].startswith(_SEGMENTS)
        elif inside and head[0] == "Pss:":
            total += int(head[1]) * 1024
    return total


def _kib(text: str, key: str) -> int:
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{key}:")) * 1024


def tensor_peak(world: World, name: str, work: Workload, mode: str) -> int:
    """Bytes of live storages and mapped segments at the peak of a step after warm-up, of one contender on this rank."""
    shares, segments = work.batches(world.rank, world.size), segment_bytes()
    with StoragePeak() as peak:
        contender = LINEUP[name](Seat(work, mode, world))
        for share in shares[:WARM_UP_STEPS]:
            contender.step(share)
        peak.mark()
        for share in shares[:MEASURED_STEPS]:
            contender.step(share)
    return peak.bytes + segment_bytes() - segments


def resident_peak(world: World, name: str, work: Workload, mode: str) -> int | None:
    """Bytes by which the process had grown at the peak of a step after warm-up, from before the contender was made."""
    shares = work.batches(world.rank, world.size)
    gc.collect()
    before = pss_bytes()
    contender = LINEUP[name](Seat(work, mode, world))
    for share in shares[:WARM_UP_STEPS]:
        contender.step(share)
    with ResidentPeak() as peak:
        for share in shares[:MEASURED_STEPS]:
            contender.step(share)
    return None if before is None else peak.bytes - before
