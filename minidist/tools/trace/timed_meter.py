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
    """A period in which this rank did the computation `name`, or waited for the operation `name`.

    begin, end: timestamps of the recording's clock; nanoseconds in a `RankRecording`. end: None while the period lasts.
    attributes: the attributes of this span and of the spans around it, such as {"step": 3, "micro_batch": 0}.
    """

    name: str
    begin: Any
    end: Any = None
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass
class OperationSpan:
    """A communication operation of this rank, with the times from launch to completion.

    record: the meter's record of the operation. launched: time of the launch. reported: time at which the backend
    reported the completion; None without a report. waited: time at which the wait for the operation ended; None without
    a wait. Times are timestamps of the recording's clock; nanoseconds in a `RankRecording`. attributes: those of the
    `TimedSpan`s around the launch, such as {"step": 3}.
    """

    record: Record
    launched: Any
    attributes: dict[str, Any]
    reported: Any = None
    waited: Any = None

    @property
    def completion_time(self) -> Any:
        """The earlier of `reported` and `waited`; None if both are unknown."""
        return min((time for time in (self.reported, self.waited) if time is not None), default=None)


@dataclass
class RankRecording:
    """All that one rank computed, waited for and communicated between `begin` and `end`, in nanoseconds of one clock.

    spans: the computations, in the order of begin; they may be nested. waits: when the host (on CUDA: the stream)
    waited for communication. operations: all operations that were launched.
    """

    begin: int
    end: int
    spans: list[TimedSpan]
    waits: list[TimedSpan]
    operations: list[OperationSpan]


class TimedMeter(Meter):
    """A `Meter` (counts operations and bytes) that also records the times of operations, waits and computations.

    It does so between `start_recording` and `stop_recording`. Memory grows with every recorded operation, so recordings
    should be short.
    """

    def __init__(self):
        super().__init__(keep=False)
        self._times: HostClock | DeviceClock | None = None
        self._reset()

    def start_recording(self, clock: HostClock | DeviceClock) -> None:
        """Discard any earlier recording and begin a new one, with times from `clock`."""
        self._reset()
        self._times = clock
        self._begin = clock.now()

    def stop_recording(self, offset_ns: int = 0) -> RankRecording:
        """End the recording and return it.

        offset_ns: nanoseconds to add to every time, so that all ranks use one clock (see `measure_clock_offset`).
        """
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
        """Count a launched operation and return its record, as `Meter` does; if recording, keep the launch time."""
        record = super().record(*args, **kwargs)
        if self._times is not None:
            # The span keeps the record alive, so that no other object gets this id.
            self._recorded[id(record)] = OperationSpan(record, self._times.now(), self._enclosing)
        return record

    def on_launch(self, records: Sequence[Record], works: Sequence) -> None:
        """During a recording, ask the backend to report when these operations complete; the time is kept then.

        Does nothing on CUDA, where the end of the stream's wait counts as the completion. works: torch's handles.
        """
        operations = [self._recorded[id(record)] for record in records if id(record) in self._recorded]
        if not operations or len(works) != len(operations) or not isinstance(self._times, HostClock):
            return
        for operation, work in zip(operations, works, strict=True):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # gloo's transfers do not report completion
                work.get_future().add_done_callback(self._completion_callback(operation))

    def on_wait_end(self, record: Record) -> None:
        """Note in `record` that the wait for the operation has ended, as `Meter` does; if recording, keep the time."""
        super().on_wait_end(record)
        operation = self._recorded.get(id(record))
        if operation is not None and operation.waited is None:
            operation.waited = self._times.now()

    @contextlib.contextmanager
    def _record_span(self, spans: list[TimedSpan], name: str, attributes: dict) -> Iterator[None]:
        """Return a context manager whose begin and end a recording appends to `spans`.

        name, attributes: of the span. Spans inside it inherit the attributes.
        """
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
        """Return a context manager; a recording keeps its begin and end as the computation `name`.

        attributes: describe the computation and everything inside the context, such as step=3.
        """
        return self._record_span(self._spans, name, attributes)

    def waiting(self, records: Sequence[Record]) -> contextlib.AbstractContextManager:
        """Return a context manager; a recording keeps its begin and end as a wait of this rank for these operations."""
        return self._record_span(self._waits, records[0].name, {"of": list(records)})

    def _completion_callback(self, operation: OperationSpan):
        """Return a callback for a future that stores the present time as the operation's completion."""
        now = self._times.now

        def report(_) -> None:  # runs in a thread of the backend
            operation.reported = now()

        return report

    def _reset(self) -> None:
        """Discard the recording."""
        self._begin = None
        self._enclosing: dict[str, Any] = {}
        self._spans: list[TimedSpan] = []
        self._waits: list[TimedSpan] = []
        self._recorded: dict[int, OperationSpan] = {}
