"""The meter: one record per communication operation, with its bytes on the wire.

`collectives` writes the records of the package's own operations. The recording process group
(`tools/recording_backend.py`) writes the same type of record for everything else that is built on torch.distributed.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from minidist.comm.wire_bytes import ASSUMED_ALGORITHMS, COUNTED_OPERATIONS, sent_elements

_NOTHING = contextlib.nullcontext()


@dataclass
class Record:
    """One communication operation of one rank.

    name: all_reduce, reduce_scatter, ...
    group_name, ranks: name and global ranks of the group; seq: its number on its channel (`status.Channel`), from 1.
    shape, dtype: those of the tensor that `wire_bytes.sent_elements` counts (the full tensor of an all-gather, for
    example). payload_bytes: the size of that tensor; wire_bytes: the bytes that this rank sends.
    algorithm: the algorithm for which `wire_bytes` was computed; modelled: whether the algorithm is assumed, because
    the backend does not say which one it uses.
    device: device of the tensor; peer, tag: of a transfer, the global rank at its other end, and its tag; batch: a
    number shared by transfers that were launched together, otherwise None.
    launched, waited: positions of the launch and of the end of the wait in the order of this rank's events, which the
    meter numbers 1, 2, ...; no times. `waited` is None until the wait has ended.
    """

    name: str
    group_name: str
    ranks: tuple[int, ...]
    seq: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    payload_bytes: int
    wire_bytes: int
    algorithm: str
    modelled: bool
    device: str = "cpu"
    peer: int | None = None
    tag: int = 0
    batch: int | None = None
    launched: int = 0
    waited: int | None = None


@dataclass
class Meter:
    """Counts the communication of one rank: a record per operation, in the order of launch, and totals by group.

    keep: whether to keep every record and event. A long training run keeps totals only, so that memory does not grow.
    operations: number of operations by (group name, operation). wire_bytes: bytes that this rank sent, by group name.
    events: (position, label) of each `add_event`. waited_s: seconds for which the rank was blocked in waits; on CUDA,
    where a wait orders streams, only in those that block the host.
    """

    keep: bool = True
    records: list[Record] = field(default_factory=list)
    operations: Counter = field(default_factory=Counter)
    wire_bytes: Counter = field(default_factory=Counter)
    events: list[tuple[int, str]] = field(default_factory=list)
    waited_s: float = 0.0
    _clock: int = 0

    def record(
        self,
        name: str,
        group_name: str,
        ranks: tuple[int, ...],
        rank: int,
        seq: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        root: int = 0,
        splits: list[int] | None = None,
        algorithm: str | None = None,
        **more,
    ) -> Record:
        """Count one launched operation of group rank `rank` and return its record.

        root, splits: as in `wire_bytes.sent_elements`. algorithm: the algorithm that is known to run; None: the one
        that `wire_bytes` assumes. All other arguments, also those in `more`, are fields of `Record`.
        """
        numel = math.prod(shape)
        sent = sent_elements(name, numel, len(ranks), rank, root=root, splits=splits)
        record = Record(
            name=name,
            group_name=group_name,
            ranks=ranks,
            seq=seq,
            shape=shape,
            dtype=dtype,
            payload_bytes=numel * dtype.itemsize,
            wire_bytes=sent * dtype.itemsize,
            algorithm=algorithm or ASSUMED_ALGORITHMS[name],
            modelled=algorithm is None and name not in COUNTED_OPERATIONS,
            launched=self._tick(),
            **more,
        )
        self.operations[group_name, name] += 1
        self.wire_bytes[group_name] += record.wire_bytes
        if self.keep:
            self.records.append(record)
        return record

    def on_wait_end(self, record: Record) -> None:
        """Set `record.waited` to the next number of the event counter, unless an earlier call has set it."""
        if record.waited is None:
            record.waited = self._tick()

    def add_wait(self, seconds: float) -> None:
        """Add the duration of one wait to `waited_s`."""
        self.waited_s += seconds

    def add_event(self, label: str) -> None:
        """Record an event, such as the backward of a layer, in sequence with the launches and waits.

        label: any name for the event. The event's position in `events` shows which operations were launched before it.
        """
        tick = self._tick()
        if self.keep:
            self.events.append((tick, label))

    # `TimedMeter` (`tools/trace/timed_meter.py`) implements the next three; here they do nothing.

    def span(self, name: str, **what) -> contextlib.AbstractContextManager:
        """Return a context manager for the time in which this rank does the named work (forward, optimizer, ...).

        what: attributes of the work, such as the micro-batch. A no-op here; `TimedMeter` records the time in a trace.
        """
        return _NOTHING

    def waiting(self, records: Sequence[Record]) -> contextlib.AbstractContextManager:
        """Return a context manager for the time in which this rank waits for these operations; a no-op here."""
        return _NOTHING

    def on_launch(self, records: Sequence[Record], works: Sequence) -> None:
        """Called when the backend has launched these operations; a no-op here. works: torch's handles, to wait on."""

    @property
    def total_wire_bytes(self) -> int:
        """Bytes that this rank has sent in all groups, counted or modelled (see `Record.modelled`)."""
        return sum(self.wire_bytes.values())

    def next_batch_id(self) -> int:
        """Return a new number, unique on this rank, for transfers that are about to be launched together."""
        return self._tick()

    def _tick(self) -> int:
        """Return the next number of this rank's event counter."""
        self._clock += 1
        return self._clock
