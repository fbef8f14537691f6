"""The peak of a rank's tensors, exact to the byte, from the allocations that torch's profiler records.

The profiler sees the allocation and the end of every storage, whether Python or C++ owns it. It misses storages that
other threads allocate, and the end of storages that existed before recording began.
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
    """The measured peak memory of one rank, in bytes.

    total: the peak of all tensors together. breakdown: the parts of this total by kind of tensor ("parameters",
    "activations", ...). peak_by_kind: the peak of each kind alone, which may occur at another time. shared_segments:
    this process's part of the shared memory that it maps, in addition to the tensors. allocator_peak: on CUDA, the peak
    that torch's allocator reports; else None.
    """

    total: int
    breakdown: dict[str, int]
    peak_by_kind: dict[str, int]
    shared_segments: int
    allocator_peak: int | None = None


class StoragePeak:
    """Context manager that measures the peak memory, in bytes, of the tensors that are allocated within it.

    device: the device whose memory is measured; None: the CPU. After the context, `bytes` is the peak since the last
    `reset_peak()`, or since the beginning, and `peak` the whole `MemoryPeak`. Raises RuntimeError if another torch
    profiler is active or becomes active: torch allows only one.
    """

    _MARK = "minidist memory: "

    def __init__(self, device: torch.device | None = None):
        self.device = device or torch.device("cpu")
        self._scans: list[Labels | None] = []  # the labels at each mark in the recording; None at resets
        self._first_scan = 0

    def __enter__(self) -> "StoragePeak":
        if torch._C._autograd._profiler_enabled():  # it would end silently
            raise RuntimeError("another torch profiler is recording")
        self._profiler = torch.autograd.profiler.profile(profile_memory=True)
        self._profiler.__enter__()
        self._mark_scan(None)
        return self

    def reset_peak(self) -> None:
        """Start anew: the peak of the context is the peak from this call on. Tensors that live now still count."""
        self._first_scan = len(self._scans)
        self._mark_scan(None)

    def _mark_scan(self, labels: Labels | None) -> None:
        """Mark a place in the profiler's record: a scan of live tensors, with their labels (None without any)."""
        with torch.profiler.record_function(f"{self._MARK}{len(self._scans)}"):
            self._scans.append(labels)

    def __exit__(self, *exception) -> None:
        self._profiler.__exit__(*exception)
        if exception[0] is None:
            self.peak = self._compute_peak()
            self.bytes = self.peak.total

    def _compute_peak(self) -> MemoryPeak:
        """Replay the recorded allocations and labels; return the peak."""
        history, first_event, seen = _AllocationHistory(), 0, 0
        for address, size, scan in self._events():
            if scan is None:
                history.record_alloc(address, size) if size > 0 else history.record_free(address)
                continue
            seen += 1
            if scan == self._first_scan:
                first_event = len(history.events)
            if self._scans[scan] is not None:
                history.label_blocks(self._scans[scan])
        if seen < len(self._scans):
            raise RuntimeError("another torch profiler replaced this one")
        total, breakdown, peak_by_kind = history.compute_peak(first_event)
        cuda = self.device.type == "cuda"
        allocator = torch.cuda.max_memory_allocated(self.device) if cuda else None
        return MemoryPeak(total, breakdown, peak_by_kind, shared_segment_bytes(), allocator)

    def _events(self) -> Iterator[tuple[int, int, int | None]]:
        """Yield the recorded events in order, as three numbers.

        (address, bytes, None) for an allocation, with negative bytes when it is freed; (0, 0, number) for a scan.
        """

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


class _AllocationHistory:
    """The allocations and frees of a device's memory blocks in order, from which the peak is computed.

    events: (1 if allocated or -1 if freed, index of the block), in order. blocks: [kind, bytes] of each block; the kind
    is None until `label_blocks` sets it.
    """

    def __init__(self):
        self.events: list[tuple[int, int]] = []
        self.blocks: list[list] = []
        self._live: dict[int, int] = {}  # address to block
        self._older: dict[int, int] = {}  # the live blocks that existed before recording began

    def record_alloc(self, address: int, num_bytes: int) -> None:
        """Record that a block of memory was allocated. A live block at this address counts as freed."""
        self.record_free(address)
        self._live[address] = len(self.blocks)
        self.events.append((1, len(self.blocks)))
        self.blocks.append([None, num_bytes])

    def record_free(self, address: int) -> None:
        """Record that the block at this address was freed. Does nothing if the history has no live block there."""
        if address in self._live:
            self._older.pop(address, None)
            self.events.append((-1, self._live.pop(address)))

    def label_blocks(self, labels: Labels) -> None:
        """Set the kinds of the live blocks at these addresses; a block that has a kind keeps it.

        labels: address to (kind, bytes). Storages from before the recording enter the history here. As torch does not
        report when they are freed, they leave when they are no longer labelled or their address is allocated again.
        """
        for address, (kind, size) in labels.items():
            if address not in self._live:
                self._live[address] = self._older[address] = len(self.blocks)
                self.blocks.append([kind, size])
            elif self.blocks[self._live[address]][0] is None:
                self.blocks[self._live[address]][0] = kind
        for address in self._older.keys() - labels.keys():
            # Activations are labelled only when autograd saves them.
            if self.blocks[self._older[address]][0] != ACTIVATIONS:
                self.record_free(address)

    def compute_peak(self, first_event: int) -> tuple[int, dict[str, int], dict[str, int]]:
        """Return total, breakdown and peak_by_kind of `MemoryPeak`. first_event: number of events to ignore."""
        allocated = {number for sign, number in self.events if sign > 0}
        live: dict[str, int] = {}
        total, breakdown, peak_by_kind = -1, {}, {}
        older = [(1, number) for number in range(len(self.blocks)) if number not in allocated]
        for position, (sign, number) in enumerate([*older, *self.events], 1 - len(older)):
            kind, size = self.blocks[number][0] or BUFFERS, self.blocks[number][1]
            live[kind] = live.get(kind, 0) + sign * size
            if position < first_event:
                continue
            peak_by_kind |= {name: count for name, count in live.items() if count > peak_by_kind.get(name, 0)}
            if sum(live.values()) > total:
                total, breakdown = sum(live.values()), {name: count for name, count in live.items() if count}
        return max(0, total), breakdown, peak_by_kind


def shared_segment_bytes() -> int:
    """Return this process's part of the shared memory that it maps, in bytes; 0 if the system has no /proc.

    Memory that n processes map counts as 1/n in each (the kernel's PSS).
    """
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
