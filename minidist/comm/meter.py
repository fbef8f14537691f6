"""What went over the wire: one record per operation.

The door writes these records for the package's own traffic, and the recording group (`recording.py`) writes the same
records for anything else that is built on torch.distributed.
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

    name: all_reduce, reduce_scatter, ... ; use: what the group is for; seq: its number on that group, from 1.
    shape, dtype: the tensor the convention table counts.
    payload_bytes: the size of that tensor; wire_bytes: what this rank sends.
    algorithm: what the wire bytes stand for; modelled: whether that algorithm was assumed rather than seen.
    device: where the tensor is; peer, tag: of a transfer, the global rank on its other end, and its tag; batch: what
    transfers that were launched together have in common.
    launched, waited: places in the order of events of this rank's meter; `waited` is None until the wait ended.
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
    """The records of one rank, in the order of launch, and running totals.

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

        algorithm: by which it is carried out, where that is no secret of the backend; its bytes are those of the table.
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
        """The operation's wait has ended."""
        if record.waited is None:
            record.waited = self._tick()

    def event(self, label: str) -> None:
        """Put a mark of the caller's own (say, a layer's backward) into the same order of events."""
        tick = self._tick()
        if self.keep:
            self.events.append((tick, label))

    # What a meter with a clock (`timed.py`) makes something of.

    def span(self, name: str, **what) -> contextlib.AbstractContextManager:
        """Within this context the rank does something that has a name."""
        return _NOTHING

    def waiting(self, records: Sequence[Record]) -> contextlib.AbstractContextManager:
        """Within this context the rank waits for these operations."""
        return _NOTHING

    def started(self, records: Sequence[Record], works: Sequence) -> None:
        """The operations of these records are on their way; works: torch's handles for them."""

    @property
    def total_wire_bytes(self) -> int:
        """Bytes this rank has sent, over all uses."""
        return sum(self.wire_bytes.values())

    def next_batch(self) -> int:
        """A number for transfers that are about to be launched together."""
        return self._tick()

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
