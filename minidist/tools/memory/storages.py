"""The peak of a rank's tensors, exact to the byte, from torch's own allocator.

It reports every storage it makes and frees, whoever holds it, Python or C++. Not seen are storages that another thread
than the one that trains allocates, and the end of those that were there before.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._C._profiler import _EventType

ACTIVATIONS, BUFFERS = "activations", "buffers"
Look = dict[int, tuple[str, int]]  # address to kind and bytes

_SELF = Path("/proc/self")
_SEGMENTS = ("/memfd:", "/dev/shm/")


@dataclass(frozen=True)
class Peak:
    """Bytes of a rank. total: of all tensors, where it was largest; parts: what that consists of, by kind.

    largest: the most of each kind at any time, which need not be the same for all. segments: mapped shared memory, this
    rank's part of it, beside the tensors. allocator: on CUDA, the peak that torch's allocator itself reports.
    """

    total: int
    parts: dict[str, int]
    largest: dict[str, int]
    segments: int
    allocator: int | None = None


class StoragePeak:
    """Context in which every allocation of a tensor is recorded; `mark()` begins the part whose peak counts.

    device: whose memory. `bytes` afterwards: the most that was live at one time since the mark (since the beginning
    when there was none), of what was allocated in the context. Raises RuntimeError when another profiler of torch's
    records already, or has begun to meanwhile: there is room for one.
    """

    _MARK = "minidist memory: "

    def __init__(self, device: torch.device | None = None):
        self.device = device or torch.device("cpu")
        self._looks: list[Look | None] = []  # what was seen at each mark, None where nobody looked
        self._first = 0

    def __enter__(self) -> "StoragePeak":
        if torch._C._autograd._profiler_enabled():  # which would end without a word
            raise RuntimeError("another profiler of torch's is recording")
        self._profiler = torch.autograd.profiler.profile(profile_memory=True)
        self._profiler.__enter__()
        self._look(None)
        return self

    def mark(self) -> None:
        """From here on it counts."""
        self._first = len(self._looks)
        self._look(None)

    def _look(self, seen: Look | None) -> None:
        with torch.profiler.record_function(f"{self._MARK}{len(self._looks)}"):
            self._looks.append(seen)

    def __exit__(self, *exception) -> None:
        self._profiler.__exit__(*exception)
        if exception[0] is None:
            self.peak = self._found()
            self.bytes = self.peak.total

    def _found(self) -> Peak:
        history, first, seen = History(), 0, 0
        for address, size, look in self._events():
            if look is None:
                history.allocation(address, size)
                continue
            seen += 1
            if look == self._first:
                first = len(history.happened)
            if self._looks[look] is not None:
                history.look(self._looks[look])
        if seen < len(self._looks):
            raise RuntimeError("another profiler of torch's took the place of this one")
        total, parts, largest = history.peak(first)
        cuda = self.device.type == "cuda"
        allocator = torch.cuda.max_memory_allocated(self.device) if cuda else None
        return Peak(total, parts, largest, segment_bytes(), allocator)

    def _events(self) -> Iterator[tuple[int, int, int | None]]:
        """(address, bytes, None) of every allocation, bytes below 0 where it is freed; (0, 0, number) of every look."""

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


class History:
    """Every block of memory: when it was made and freed, and what it was.

    happened: (1 when made or -1 when freed, block), in order; a block is a place in `blocks`, [kind, bytes].
    """

    def __init__(self):
        self.happened: list[tuple[int, int]] = []
        self.blocks: list[list] = []
        self._alive: dict[int, int] = {}  # by address
        self._older: dict[int, int] = {}  # those of them that were there before anything was recorded

    def allocation(self, address: int, size: int) -> None:
        """size: below 0 where it is freed."""
        if address in self._alive:
            self._free(address)
        if size > 0:
            self._alive[address] = len(self.blocks)
            self.happened.append((1, len(self.blocks)))
            self.blocks.append([None, size])

    def look(self, seen: Look) -> None:
        """What is alive that has a kind. What was there before is met here; torch tells of its end only to who looks
        and no longer sees it, or of something else in its place."""
        for address, (kind, size) in seen.items():
            if address not in self._alive:
                self._alive[address] = self._older[address] = len(self.blocks)
                self.blocks.append([kind, size])
            elif self.blocks[self._alive[address]][0] is None:
                self.blocks[self._alive[address]][0] = kind
        for address in self._older.keys() - seen.keys():
            if self.blocks[self._older[address]][0] != ACTIVATIONS:  # these are seen only when they are kept
                self._free(address)

    def _free(self, address: int) -> None:
        self._older.pop(address, None)
        self.happened.append((-1, self._alive.pop(address)))

    def peak(self, first: int) -> tuple[int, dict[str, int], dict[str, int]]:
        """(total, parts, largest) of `Peak`. first: how many of what happened do not count."""
        made = {number for sign, number in self.happened if sign > 0}
        now: dict[str, int] = {}
        total, parts, largest = -1, {}, {}
        before = [(1, number) for number in range(len(self.blocks)) if number not in made]
        for place, (sign, number) in enumerate([*before, *self.happened], 1 - len(before)):
            kind, size = self.blocks[number][0] or BUFFERS, self.blocks[number][1]
            now[kind] = now.get(kind, 0) + sign * size
            if place < first:
                continue
            largest |= {name: count for name, count in now.items() if count > largest.get(name, 0)}
            if sum(now.values()) > total:
                total, parts = sum(now.values()), {name: count for name, count in now.items() if count}
        return max(0, total), parts, largest


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
