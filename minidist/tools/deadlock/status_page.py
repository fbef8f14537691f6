"""The status page: rank status in memory that another process can read.

A rank writes to its page before it launches an operation, before it waits for one and after the wait. Operations are
numbered by channel: an ordered sequence of operations, such as all collectives of a group. The page has a fixed layout
(little-endian), so a process that shares the memory reads it without stopping the rank, even one that hangs inside C++.

    0    version, odd while the rank is writing              u64
    8    state, channel waited on, number of channels, seq   u8 pad u16 u16 pad u64
    24   operation waited for                                72 bytes of text
    96   file:line of the wait                               160 bytes of text
    256  one entry per channel: launched u64, pending u64, the last four operations (chained crc u32, 60 bytes of
         text), name 184
"""

import math
import struct
import time
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from minidist.comm.status import Channel, OperationTracker
from minidist.tools.deadlock.caller import find_user_code_line

PAGE_BYTES = 65536  # a whole number of memory pages everywhere; untouched ones cost nothing
STATES = ("idle", "running", "waiting", "returned", "failed", "pending")

_VERSION = struct.Struct("<Q")
_HEADER = struct.Struct("<BxHHxxQ72s160s")
_HEADER_AT, _STATE_AT, _COUNT_AT, _CHANNELS_AT = 8, 8, 12, 256
_COUNTS = struct.Struct("<QQ")
_RECENT = struct.Struct("<I60s")
_KEPT = 4
_NAME_AT = _COUNTS.size + _KEPT * _RECENT.size
_NAME_BYTES = 184
_ENTRY_BYTES = _NAME_AT + _NAME_BYTES
_MAX_CHANNELS = (PAGE_BYTES - _CHANNELS_AT) // _ENTRY_BYTES
_NO_CHANNEL = 0xFFFF
_PENDING_VERSION = 1 << 62  # versions of a rank that runs while an operation is pending are above this


class ChannelProgress(NamedTuple):
    """The operations that a rank has launched on one channel: an ordered sequence, such as all collectives of a group.

    num_launched: how many. recent_operations: the last four, oldest first, each as (crc, description). The crc covers
    all operations of the channel up to this one, so equal crcs on two ranks mean equal sequences. num_pending: how many
    of the launched operations the GPU has not completed; 0 on the CPU.
    """

    num_launched: int
    recent_operations: tuple[tuple[int, str], ...]
    num_pending: int = 0


@dataclass(frozen=True)
class Snapshot:
    """The status of one rank at one moment, read from its `StatusPage`. Nothing happened between two equal snapshots.

    version: grows with every change of the status. state: "idle" (starting), "running", "waiting" (for an operation),
    "returned", "failed", "pending" (running, but the GPU has not completed an operation), or "died", which a reader
    sets. The wait_ fields describe one operation: in state "pending" the oldest pending one, else the one that the
    rank waits for or last waited for. wait_seq: its sequence number on its channel (`wait_channel`), or 0 if there was
    none yet. wait_operation: its name, shape and dtype as text. wait_location: the "file:line" of the call.
    """

    version: int
    state: str
    wait_seq: int
    wait_operation: str
    wait_location: str
    _entry: int = field(repr=False)
    _page: bytes = field(repr=False)

    # Most readings are only compared with the one before: the channels are parsed on first use.
    @cached_property
    def progress_by_channel(self) -> Mapping[Channel, ChannelProgress]:
        """The operations that the rank has launched, by channel (an ordered sequence of operations of a group)."""
        return dict(_read_entry(self._page, at) for at in range(_CHANNELS_AT, len(self._page), _ENTRY_BYTES))

    def progress_on(self, channel: Channel) -> ChannelProgress | None:
        """Return how many and which operations the rank has launched on `channel`; None for an unused channel."""
        return self.progress_by_channel.get(channel)

    @cached_property
    def wait_channel(self) -> Channel | None:
        """The channel of the operation that the rank waits for or last waited for.

        None before the first wait, or if the status page had no room for the channel.
        """
        channels = list(self.progress_by_channel)
        return channels[self._entry] if self.wait_operation and self._entry < len(channels) else None


class _PendingOperation(NamedTuple):
    """An operation that the GPU may not have completed. text, location: as on the page. work: torch's handle."""

    channel: Channel
    seq: int
    text: bytes
    location: bytes
    work: Any

    def is_completed(self) -> bool:
        """Return whether the operation has completed or failed; the backend reports a failure itself."""
        try:
            return self.work.is_completed()
        except RuntimeError:
            return True


class StatusPage(OperationTracker):
    """The status of this rank (what it waits for, what it has launched) in memory that other processes can read.

    Only this process writes it: the collectives call `on_launch`, `on_wait` and `on_resume`. buffer: PAGE_BYTES of
    zeroed writable memory, shared with the reader; None: private memory.
    """

    def __init__(self, buffer=None):
        self._page = memoryview(bytearray(PAGE_BYTES) if buffer is None else buffer)
        self._version = 0
        self._channels: dict[Channel, list[int]] = {}  # -> [entry or -1, launched, chain]
        self._signatures: dict[tuple, tuple[bytes, bytes]] = {}
        self._location = b""
        self._pending: deque[_PendingOperation] | None = None
        self._num_completed = 0

    def track_pending_operations(self) -> None:
        """From now on, record operations that the GPU has not completed, as `on_pending` reports them.

        Deadlock detection on GPUs needs them, because there a wait does not block the program.
        """
        self._pending = deque()

    def on_launch(self, channel: Channel, name: str, shape: tuple[int, ...], dtype: object) -> int:
        """Record that this rank launches an operation; return the operation's sequence number on `channel`: 1, 2, ...

        channel: an ordered sequence of operations, such as all collectives of a group. name: the operation's name.
        shape, dtype: of its tensor. Ranks that launch different operations under one number are reported as a mismatch.
        """
        known = self._channels.get(channel) or self._add_entry(channel)
        text, signature = self._signature(channel.kind, name, shape, dtype)
        entry, launched, chain = known
        known[1] = launched = launched + 1
        known[2] = chain = zlib.crc32(signature, chain)
        if entry >= 0:
            at = _CHANNELS_AT + entry * _ENTRY_BYTES
            self._begin_write()
            _RECENT.pack_into(self._page, at + _COUNTS.size + launched % _KEPT * _RECENT.size, chain, text)
            _COUNTS.pack_into(self._page, at, launched, 0)
            self._end_write()
        return launched

    def on_wait(
        self, channel: Channel, seq: int, name: str, shape: tuple[int, ...], dtype: object, location: str | None = None
    ) -> None:
        """Record that this rank now begins to wait until operation `seq` of `channel` has completed; return at once.

        name, shape, dtype: of the operation, as in `on_launch`. location: "file:line" of the call; None: the line of
        the user's program that is running.
        """
        known = self._channels.get(channel) or self._add_entry(channel)
        entry = known[0] if known[0] >= 0 else _NO_CHANNEL
        text, _ = self._signature(channel.kind, name, shape, dtype)
        # The end of a long path holds the file and the line.
        self._location = (location or find_user_code_line()).encode()[-160:]
        self._begin_write()
        _HEADER.pack_into(self._page, _HEADER_AT, 2, entry, self._num_entries, seq, text, self._location)
        self._end_write()

    def on_pending(self, channel: Channel, seq: int, name: str, shape: tuple[int, ...], dtype: object, work) -> None:
        """Record that operation `seq` of `channel` may still run on the GPU, although the wait for it has returned.

        Does nothing before `track_pending_operations`. work: torch's handle of the operation. name, shape, dtype: as in
        `on_launch`. `poll_pending_and_get_version` forgets the operation once it has completed.
        """
        if self._pending is not None and self._channels[channel][0] >= 0:
            text, _ = self._signature(channel.kind, name, shape, dtype)
            self._pending.append(_PendingOperation(channel, seq, text, self._location, work))

    def on_resume(self) -> None:
        """Record that this rank is running: its wait has ended, or its function starts."""
        self._set_state("running")

    def record_end(self, state: str) -> None:
        """Record that this rank has ended. state: "returned" or "failed"."""
        self._set_state(state)

    def reset_channels(self) -> None:
        """Forget all launched operations and the latest wait: the next operation of every channel has number 1."""
        self._begin_write()
        end = _CHANNELS_AT + self._num_entries * _ENTRY_BYTES
        self._page[_HEADER_AT:end] = bytes(end - _HEADER_AT)
        self._page[_STATE_AT] = STATES.index("running")
        self._end_write()
        self._channels.clear()

    def take_snapshot(self) -> Snapshot | None:
        """Return the present status of this rank; None while another thread of this process is writing it.

        A running rank with operations that the GPU has not completed has the state "pending" and describes the oldest
        one.
        """
        snapshot = StatusPage.read_snapshot(self._page)
        pending = [operation for operation in self._pending or () if not operation.is_completed()]
        if snapshot is None or not pending or snapshot.state not in ("running", "waiting"):
            return snapshot
        page, oldest = bytearray(snapshot._page), pending[0]
        first = {operation.channel: operation.seq for operation in reversed(pending)}
        if snapshot.state == "waiting" and snapshot.wait_channel is not None:
            first.setdefault(snapshot.wait_channel, snapshot.wait_seq)  # it cannot overtake the pending ones
        for channel, seq in first.items():
            at = _CHANNELS_AT + self._channels[channel][0] * _ENTRY_BYTES
            (launched, _) = _COUNTS.unpack_from(page, at)
            _COUNTS.pack_into(page, at, launched, launched - seq + 1)
        listed = _COUNT.unpack_from(page, _COUNT_AT)[0]
        is_running = snapshot.state == "running"
        state, entry = STATES.index("pending" if is_running else "waiting"), self._channels[oldest.channel][0]
        _HEADER.pack_into(page, _HEADER_AT, state, entry, listed, oldest.seq, oldest.text, oldest.location)
        if is_running:  # it counts as unchanged while the same operation is pending, whatever the rank launches
            _VERSION.pack_into(page, 0, _PENDING_VERSION + 2 * self._num_completed)
        return StatusPage.read_snapshot(page)

    def to_bytes(self) -> bytes:
        """Return the present status of this rank as bytes, which another process can pass to `read_snapshot`."""
        while (snapshot := self.take_snapshot()) is None:  # this rank is writing, in another thread
            time.sleep(1e-3)
        return snapshot._page

    @staticmethod
    def read_snapshot(buffer) -> Snapshot | None:
        """Read a rank's status from `buffer`: its status page in shared memory, or the bytes of `to_bytes`.

        Returns None if the rank was writing at that moment: then read again.
        """
        page = memoryview(buffer)
        (before,) = _VERSION.unpack_from(page)
        state, entry, listed, seq, operation, where = _HEADER.unpack_from(page, _HEADER_AT)
        copy = bytes(page[: _CHANNELS_AT + listed * _ENTRY_BYTES])
        (after,) = _VERSION.unpack_from(page)
        if before != after or before % 2:
            return None
        return Snapshot(before, STATES[state], seq, _decode_text(operation), _decode_text(where), entry, copy)

    @property
    def is_blocked(self) -> bool:
        """Whether this rank waits for an operation, or had an operation pending on the GPU at the latest poll."""
        state = STATES[self._page[_STATE_AT]]
        return state == "waiting" or (bool(self._pending) and state == "running")

    def poll_pending_and_get_version(self) -> int:
        """Forget operations that the GPU has completed since the last call; return the version of the rank's status.

        The version is a number that changes whenever the status changes, also when only a pending operation has
        completed.
        """
        while self._pending and self._pending[0].is_completed():
            self._pending.popleft()
            self._num_completed += 1
        if self._pending and STATES[self._page[_STATE_AT]] == "running":
            return _PENDING_VERSION + 2 * self._num_completed
        return self._version

    @property
    def _num_entries(self) -> int:
        """The number of channels that have an entry on the page."""
        return _COUNT.unpack_from(self._page, _COUNT_AT)[0]

    def _begin_write(self) -> None:
        """Make the version odd: readers discard what they read until `_end_write`."""
        _VERSION.pack_into(self._page, 0, self._version + 1)

    def _end_write(self) -> None:
        """Make the version even again, and larger than before."""
        self._version += 2
        _VERSION.pack_into(self._page, 0, self._version)

    def _set_state(self, state: str) -> None:
        """Write the rank's state to the page."""
        self._begin_write()
        self._page[_STATE_AT] = STATES.index(state)
        self._end_write()

    def _add_entry(self, channel: Channel) -> list[int]:
        """Give the channel an entry on the page; if it is full, readers do not see the channel's operations."""
        name = encode_channel(channel).encode()
        entry = self._num_entries
        if entry < _MAX_CHANNELS and len(name) <= _NAME_BYTES:
            at = _CHANNELS_AT + entry * _ENTRY_BYTES + _NAME_AT
            self._begin_write()
            self._page[at : at + len(name)] = name
            _COUNT.pack_into(self._page, _COUNT_AT, entry + 1)
            self._end_write()
        else:
            entry = -1
        self._channels[channel] = known = [entry, 0, 0]
        return known

    def _signature(self, kind: str, name: str, shape: tuple[int, ...], dtype: object) -> tuple[bytes, bytes]:
        """Return (description for messages, bytes that must be equal on all ranks) of an operation.

        kind: of its channel.
        """
        key = (kind, name, shape, dtype)
        cached = self._signatures.get(key)
        if cached is None:
            if len(self._signatures) > 4096:  # a program whose shapes never repeat must not grow
                self._signatures.clear()
            text = f"{name} {tuple(shape)} {str(dtype).removeprefix('torch.')}"
            if kind != "collective":  # a send meets a recv, whose shape may be another view of as many elements
                compared = f"{math.prod(shape)} {dtype}"
            elif name == "all_to_all":  # ranks may send unequal shares
                compared = f"{name} {dtype}"
            else:  # the backends look at elements only: () and (1,), or (8,) and (4, 2), go together
                compared = f"{name} {math.prod(shape)} {dtype}"
            cached = self._signatures[key] = (text.encode(), compared.encode())
        return cached


_COUNT = struct.Struct("<H")


def _read_entry(page: bytes, at: int) -> tuple[Channel, ChannelProgress]:
    """Return the channel and its progress from the entry at byte `at` of a page."""
    launched, pending = _COUNTS.unpack_from(page, at)
    recent = []
    for seq in range(max(1, launched - _KEPT + 1), launched + 1):
        chain, text = _RECENT.unpack_from(page, at + _COUNTS.size + seq % _KEPT * _RECENT.size)
        recent.append((chain, _decode_text(text)))
    name = _decode_text(page[at + _NAME_AT : at + _NAME_AT + _NAME_BYTES])
    return decode_channel(name), ChannelProgress(launched, tuple(recent), pending)


def _decode_text(padded: bytes) -> str:
    """Return the text of a field, which is padded with zeros."""
    return padded.rstrip(b"\0").decode(errors="replace")


def encode_channel(channel: Channel) -> str:
    """Return a channel (an ordered sequence of operations of a group) as text, for `decode_channel`.

    For instance "collective|0-6:2||0|grads" for the collectives of group "grads" of ranks 0, 2, 4, 6: evenly spaced
    ranks are written as a range, so that large groups fit into a status page.
    """
    ranks = channel.ranks
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    even = step > 0 and ranks == tuple(range(ranks[0], ranks[-1] + 1, step))
    listed = f"{ranks[0]}-{ranks[-1]}:{step}" if even else ",".join(map(str, ranks))
    peer = "" if channel.peer is None else str(channel.peer)
    return "|".join((channel.kind, listed, peer, str(channel.tag), channel.group_name))


@lru_cache(4096)
def decode_channel(name: str) -> Channel:
    """Return the channel (an ordered sequence of operations of a group) from the text that `encode_channel` made.

    Results are cached: equal texts give the identical object.
    """
    kind, listed, peer, tag, group_name = name.split("|", 4)
    if ":" in listed:
        first, last, step = map(int, listed.replace("-", ":").split(":"))
        ranks = tuple(range(first, last + 1, step))
    else:
        ranks = tuple(map(int, listed.split(",")))
    return Channel(kind, group_name, ranks, int(peer) if peer else None, int(tag))
