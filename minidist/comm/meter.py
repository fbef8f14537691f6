"""The meter: one record per communication operation, with its bytes on the wire.

`collectives` writes the records of the package's own operations. The recording process group (`tools/recording.py`)
writes the same type of record for everything else that is built on torch.distributed.
"""

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from minidist.comm.wire_bytes import ASSUMED_ALGORITHMS, COUNTED_OPERATIONS, sent_elements

_NOTHING = contextlib.nullcontext()


@dataclass
class Record:
    """One operation of one rank.

    name: all_reduce, reduce_scatter, ... ; use: the purpose of the group; seq: sequence number on that group, from 1.
    shape, dtype: those of the tensor that the table in `wire_bytes` counts.
    payload_bytes: the size of that tensor; wire_bytes: the bytes that this rank sends.
    algorithm: the algorithm to which the wire bytes belong; modelled: whether it is assumed rather than counted.
    device: device of the tensor; peer, tag: of a transfer, the global rank at its other end, and its tag; batch: a
    number shared by transfers that were launched together.
    launched, waited: positions in the order of events of this rank's meter; `waited` is None until the wait has ended.
    """

    name: str
    use: str
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
    """The records of one rank in the order of launch, and running totals by group.

    keep: whether to keep every record. A long training run keeps totals only, so that memory does not grow.
    """

    keep: bool = True
    records: list[Record] = field(default_factory=list)
    operations: Counter = field(default_factory=Counter)
    wire_bytes: Counter = field(default_factory=Counter)
    events: list[tuple[int, str]] = field(default_factory=list)
    _clock: int = 0

    def record(
        self,
        name: str,
        use: str,
        ranks: tuple[int, ...],
        rank: int,
        seq: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        root: int = 0,
        splits: list[int] | None = None,
        device: str = "cpu",
        peer: int | None = None,
        tag: int = 0,
        batch: int | None = None,
        algorithm: str | None = None,
    ) -> Record:
        """Count one launched operation of group rank `rank` and return its record.

        algorithm: the algorithm that is known to run; None: the one that `wire_bytes` assumes for the backend.
        """
        numel = 1
        for size in shape:
            numel *= size
        sent = sent_elements(name, numel, len(ranks), rank, root=root, splits=splits)
        record = Record(
            name=name,
            use=use,
            ranks=ranks,
            seq=seq,
            shape=shape,
            dtype=dtype,
            payload_bytes=numel * dtype.itemsize,
            wire_bytes=sent * dtype.itemsize,
            algorithm=algorithm or ASSUMED_ALGORITHMS[name],
            modelled=algorithm is None and name not in COUNTED_OPERATIONS,
            device=device,
            peer=peer,
            tag=tag,
            batch=batch,
            launched=self._tick(),
        )
        self.operations[use, name] += 1
        self.wire_bytes[use] += record.wire_bytes
        if self.keep:
            self.records.append(record)
        return record

    def waited(self, record: Record) -> None:
        """Record that the wait for the operation has ended."""
        if record.waited is None:
            record.waited = self._tick()

    def event(self, label: str) -> None:
        """Add an event of the caller's own (say, the backward of a layer) to the same order of events."""
        tick = self._tick()
        if self.keep:
            self.events.append((tick, label))

    # A meter with a clock (`tools/trace/timed_meter.py`) implements the next three; here they do nothing.

    def span(self, name: str, **what) -> contextlib.AbstractContextManager:
        """Return a context within which this rank does the named work (forward, optimizer, ...)."""
        return _NOTHING

    def waiting(self, records: Sequence[Record]) -> contextlib.AbstractContextManager:
        """Return a context within which this rank waits for these operations."""
        return _NOTHING

    def started(self, records: Sequence[Record], works: Sequence) -> None:
        """Record that the operations of these records are in flight. works: torch's handles of them."""

    @property
    def total_wire_bytes(self) -> int:
        """Bytes that this rank has sent in all groups."""
        return sum(self.wire_bytes.values())

    def next_batch(self) -> int:
        """Return a number for transfers that are about to be launched together."""
        return self._tick()

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
