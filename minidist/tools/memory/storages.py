"""The peak of a rank's tensors, exact to the byte, from the allocations that torch's profiler records.

The profiler sees every storage that is allocated and freed, whether Python or C++ owns it, except those allocated by
other threads, and except the end of storages that existed before recording began.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._C._profiler import _EventType

ACTIVATIONS, BUFFERS = "activations", "buffers"
Labels = dict[int, tuple[str, int]]  # address to kind and bytes of a live storage

_SELF = Path("/proc/self")
_SEGMENTS = ("/memfd:", "/dev/shm/")


@dataclass(frozen=True)
class MemoryPeak:
    """Bytes of a rank. total: the peak of all tensors together; breakdown: the total by kind.

    peak_by_kind: each kind's own peak, which may occur at another time. shared_segments: this rank's part of the mapped
    shared memory, in addition to the tensors. allocator_peak: on CUDA, the peak that torch's allocator reports.
    """

    total: int
    breakdown: dict[str, int]
    peak_by_kind: dict[str, int]
    shared_segments: int
    allocator_peak: int | None = None


class StoragePeak:
    """Context manager that measures the peak of the tensors allocated within it.

    device: whose memory. After the context, `bytes` is the peak since the last `reset_peak()`, or since the beginning
    without one, and `peak` its breakdown. Raises RuntimeError if another torch profiler is active or becomes active:
    torch allows only one.
    """

    _MARK = "minidist memory: "

    def __init__(self, device: torch.device | None = None):
        self.device = device or torch.device("cpu")
        self._scans: list[Labels | None] = []  # the labels at each mark in the recording; None at resets
        self._first_scan = 0

    def __enter__(self) -> "StoragePeak":
        if torch._C._autograd._profiler_enabled():  # it would end silently
            raise RuntimeError("another profiler of torch's is recording")
        self._profiler = torch.autograd.profiler.profile(profile_memory=True)
        self._profiler.__enter__()
        self._mark(None)
        return self

    def reset_peak(self) -> None:
        """Ignore everything before this call when computing the peak."""
        self._first_scan = len(self._scans)
        self._mark(None)

    def _mark(self, labels: Labels | None) -> None:
        with torch.profiler.record_function(f"{self._MARK}{len(self._scans)}"):
            self._scans.append(labels)

    def __exit__(self, *exception) -> None:
        self._profiler.__exit__(*exception)
        if exception[0] is None:
            self.peak = self._compute_peak()
            self.bytes = self.peak.total

    def _compute_peak(self) -> MemoryPeak:
        history, first_event, seen = AllocationHistory(), 0, 0
        for address, size, scan in self._events():
            if scan is None:
                history.record(address, size)
                continue
            seen += 1
            if scan == self._first_scan:
                first_event = len(history.events)
            if self._scans[scan] is not None:
                history.label(self._scans[scan])
        if seen < len(self._scans):
            raise RuntimeError("another profiler of torch's took the place of this one")
        total, breakdown, peak_by_kind = history.peak(first_event)
        cuda = self.device.type == "cuda"
        allocator = torch.cuda.max_memory_allocated(self.device) if cuda else None
        return MemoryPeak(total, breakdown, peak_by_kind, shared_segment_bytes(), allocator)

    def _events(self) -> Iterator[tuple[int, int, int | None]]:
        """(address, bytes, None) for every allocation, bytes negative when freed; (0, 0, number) for every scan."""

        def flat(events):
            for event in events:
                yield event
                yield from flat(event.children)

        tree = self._profiler.kineto_results.experimental_event_tree()
        for event in sorted(flat(tree), key=lambda event: event.start_time_ns):
            if event.tag == _EventType.Allocation:
                if event.extra_fields.device.type == self.device.type:
                    yield event.extra_fields.ptr, event.extra_fields.alloc_size, None
            elif event.name.startswith(self._MARK):
                yield 0, 0, int(event.name.removeprefix(self._MARK))


class AllocationHistory:
    """Every block of memory with its kind, and when it was allocated and freed.

    events: (1 if allocated or -1 if freed, index of the block), in order; blocks: [kind, bytes] of each block.
    """

    def __init__(self):
        self.events: list[tuple[int, int]] = []
        self.blocks: list[list] = []
        self._live: dict[int, int] = {}  # address to block
        self._older: dict[int, int] = {}  # the live blocks that existed before recording began

    def record(self, address: int, size: int) -> None:
        """Add an allocation; a negative size means that the block was freed."""
        if address in self._live:
            self._free(address)
        if size > 0:
            self._live[address] = len(self.blocks)
            self.events.append((1, len(self.blocks)))
            self.blocks.append([None, size])

    def label(self, labels: Labels) -> None:
        """Give kinds to the live blocks. Storages from before the recording enter the history here; as torch does not
        report their end, they leave when they are no longer labelled or their address is allocated again."""
        for address, (kind, size) in labels.items():
            if address not in self._live:
                self._live[address] = self._older[address] = len(self.blocks)
                self.blocks.append([kind, size])
            elif self.blocks[self._live[address]][0] is None:
                self.blocks[self._live[address]][0] = kind
        for address in self._older.keys() - labels.keys():
            if (
                self.blocks[self._older[address]][0] != ACTIVATIONS
            ):  # labelled only at the moment when autograd saves them
                self._free(address)

    def _free(self, address: int) -> None:
        self._older.pop(address, None)
        self.events.append((-1, self._live.pop(address)))

    def peak(self, first: int) -> tuple[int, dict[str, int], dict[str, int]]:
        """(total, breakdown, peak_by_kind) of `MemoryPeak`. first: how many events to ignore."""
        made = {number for sign, number in self.events if sign > 0}
        now: dict[str, int] = {}
        total, breakdown, peak_by_kind = -1, {}, {}
        before = [(1, number) for number in range(len(self.blocks)) if number not in made]
        for place, (sign, number) in enumerate([*before, *self.events], 1 - len(before)):
            kind, size = self.blocks[number][0] or BUFFERS, self.blocks[number][1]
            now[kind] = now.get(kind, 0) + sign * size
            if place < first:
                continue
            peak_by_kind |= {name: count for name, count in now.items() if count > peak_by_kind.get(name, 0)}
            if sum(now.values()) > total:
                total, breakdown = sum(now.values()), {name: count for name, count in now.items() if count}
        return max(0, total), breakdown, peak_by_kind


def shared_segment_bytes() -> int:
    """This process's part (PSS) of the shared-memory segments that it maps; 0 on systems without /proc."""
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
