"""A meter that also records times: of every operation, of every wait, and of what the rank computes.

It is an ordinary `Meter`, which counts the bytes that the rank sends, before `start_recording()` and after
`stop_recording()`. A plain meter has the same hooks (`span`, `waiting`, `on_launch`), which do nothing: the collectives
call them once per operation and the step once per micro-batch, whether times are recorded or not.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from minidist.comm.meter import Meter, Record
from minidist.tools.trace.clock import DeviceClock, HostClock


@dataclass
class TimedSpan:
    """A computation or a wait of this rank.

    begin, end: timestamps of the recording clock; in a `RankRecording`, nanoseconds. attributes: the attributes of this
    span and of the spans around it, such as {"step": 3, "micro_batch": 0}.
    """

    name: str
    begin: Any
    end: Any = None
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass
class OperationSpan:
    """A communication operation from launch to completion.

    launched: time of the launch, as in `TimedSpan`. reported: time at which the backend reported that the operation has
    completed, None without a report. waited: time at which the wait for it ended, None without a wait. attributes: the
    attributes of the spans in which it was launched.
    """

    record: Record
    launched: Any
    attributes: dict[str, Any]
    reported: Any = None
    waited: Any = None

    @property
    def completed(self) -> Any:
        """The time of completion: the earlier of `reported` and `waited`; None if both are unknown."""
        return min((time for time in (self.reported, self.waited) if time is not None), default=None)


@dataclass
class RankRecording:
    """The spans, waits and operations of one rank between `begin` and `end`, in nanoseconds of one clock.

    spans: nested computations, in the order of begin. waits: when the host (on CUDA: the stream) waited for
    communication. operations: all operations that were launched.
    """

    begin: int
    end: int
    spans: list[TimedSpan]
    waits: list[TimedSpan]
    operations: list[OperationSpan]


class TimedMeter(Meter):
    """A traffic `Meter` that keeps totals, and between `start_recording` and `stop_recording` every operation's times.

    Memory grows with every recorded operation, so recordings should be short.
    """

    def __init__(self):
        super().__init__(keep=False)
        self._times: HostClock | DeviceClock | None = None
        self._reset()

    def start_recording(self, times: HostClock | DeviceClock) -> None:
        """Begin a new recording, whose times are read from the clock `times`."""
        self._reset()
        self._times = times
        self._begin = times.now()

    def stop_recording(self, offset_ns: int = 0) -> RankRecording:
        """Stop and return the recording. offset_ns: is added to every time; see `clock.measure_clock_offset`."""
        times, self._times = self._times, None

        def to_common_clock(timestamp) -> int | None:
            return None if timestamp is None else times.to_host_ns(timestamp) + offset_ns

        last = times.now()
        spans, waits = (
            [
                TimedSpan(
                    s.name, to_common_clock(s.begin), to_common_clock(last if s.end is None else s.end), s.attributes
                )
                for s in recorded
            ]
            for recorded in (self._spans, self._waits)
        )
        operations = [
            OperationSpan(
                f.record,
                to_common_clock(f.launched),
                f.attributes,
                to_common_clock(f.reported),
                to_common_clock(f.waited),
            )
            for f in self._recorded.values()
        ]
        recording = RankRecording(to_common_clock(self._begin), to_common_clock(last), spans, waits, operations)
        self._reset()
        return recording

    def record(self, *args, **kwargs) -> Record:
        """Count an operation as `Meter.record` does; during a recording, also keep it with the time of its launch."""
        record = super().record(*args, **kwargs)
        if self._times is not None:
            # The span keeps the record alive, so that no other object gets this id.
            self._recorded[id(record)] = OperationSpan(record, self._times.now(), self._enclosing)
        return record

    def on_launch(self, records: Sequence[Record], works: Sequence) -> None:
        """Ask the backend to report the completion of these operations.

        On CUDA, do nothing: there the end of the stream's wait counts as the completion.
        """
        operations = [self._recorded[id(record)] for record in records if id(record) in self._recorded]
        if not operations or len(works) != len(operations) or not isinstance(self._times, HostClock):
            return
        for operation, work in zip(operations, works, strict=True):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # gloo's transfers do not report completion
                work.get_future().add_done_callback(self._completion_callback(operation))

    def on_wait_end(self, record: Record) -> None:
        """Do what `Meter.on_wait_end` does; during a recording, also keep the time at which the first wait ended."""
        super().on_wait_end(record)
        operation = self._recorded.get(id(record))
        if operation is not None and operation.waited is None:
            operation.waited = self._times.now()

    @contextlib.contextmanager
    def _timed(self, spans: list[TimedSpan], name: str, attributes: dict) -> Iterator[None]:
        if self._times is None:
            yield
            return
        times, enclosing = self._times, self._enclosing
        span = TimedSpan(name, times.now(), attributes=enclosing | attributes)
        spans.append(span)
        self._enclosing = span.attributes
        try:
            yield
        finally:
            span.end, self._enclosing = times.now(), enclosing

    def span(self, name: str, **attributes: Any) -> contextlib.AbstractContextManager:
        """Return a context whose duration is recorded as a computation `name`. attributes: see `TimedSpan`."""
        return self._timed(self._spans, name, attributes)

    def waiting(self, records: Sequence[Record]) -> contextlib.AbstractContextManager:
        """Return a context whose duration is recorded as a wait of this rank for these operations."""
        return self._timed(self._waits, records[0].name, {"of": list(records)})

    def _completion_callback(self, operation: OperationSpan):
        now = self._times.now

        def report(_) -> None:  # runs in a thread of the backend
            operation.reported = now()

        return report

    def _reset(self) -> None:
        self._begin = None
        self._enclosing: dict[str, Any] = {}
        self._spans: list[TimedSpan] = []
        self._waits: list[TimedSpan] = []
        self._recorded: dict[int, OperationSpan] = {}
