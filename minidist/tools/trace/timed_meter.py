"""A meter that also keeps times: of every operation, of every wait for one, and of what the rank computes.

It is an ordinary `Meter` until `begin()` and after `end()`. The plain one has the same three methods (`span`,
`waiting`, `started`), which do nothing: the door calls them once per operation and the step once per pass, and nobody
asks whether times are kept.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from minidist.comm.meter import Meter, Record
from minidist.tools.trace.clock import DeviceClock, HostClock


@dataclass
class Span:
    """Something this rank did or waited for; begin, end: moments, and in `Recording` nanoseconds.

    what: facts about it; those of the spans around it count too.
    """

    name: str
    begin: Any
    end: Any = None
    what: dict[str, Any] = field(default_factory=dict)


@dataclass
class Flight:
    """An operation from its launch to its completion.

    what: facts about the spans it was launched in.
    reported: when the backend said that it was complete, None when it says no such thing; waited: when the wait for it
    had ended, by when it must have been; None when nobody waited.
    """

    record: Record
    launched: Any
    what: dict[str, Any]
    reported: Any = None
    waited: Any = None

    @property
    def completed(self) -> Any:
        """When it was complete, as far as this rank knows; None when it knows nothing of it."""
        return min((moment for moment in (self.reported, self.waited) if moment is not None), default=None)


@dataclass
class Recording:
    """What one rank did between `begin` and `end`. All times are nanoseconds of one clock.

    spans: what it computed, by begin, nested; waits: when its host (on CUDA: its device) waited for communication.
    """

    begin: int
    end: int
    spans: list[Span]
    waits: list[Span]
    flights: list[Flight]


class TimedMeter(Meter):
    """Counts as a `Meter` that keeps totals only; between `begin` and `end` it keeps every operation, with times.

    Memory grows with every operation in between: somebody must bound how long that is.
    """

    def __init__(self):
        super().__init__(keep=False)
        self._times: HostClock | DeviceClock | None = None
        self._reset()

    def begin(self, times: HostClock | DeviceClock) -> None:
        """Keep times from now on, read from this clock."""
        self._reset()
        self._times = times
        self._begin = times.now()

    def end(self, offset_ns: int = 0) -> Recording:
        """Keep no more times; returns what was kept. offset_ns: what makes this clock that of all ranks."""
        times, self._times = self._times, None

        def on_all_clocks(moment) -> int | None:
            return None if moment is None else times.nanoseconds(moment) + offset_ns

        last = times.now()
        spans, waits = (
            [Span(s.name, on_all_clocks(s.begin), on_all_clocks(last if s.end is None else s.end), s.what) for s in row]
            for row in (self._spans, self._waits)
        )
        flights = [
            Flight(f.record, on_all_clocks(f.launched), f.what, on_all_clocks(f.reported), on_all_clocks(f.waited))
            for f in self._flights.values()
        ]
        recording = Recording(on_all_clocks(self._begin), on_all_clocks(last), spans, waits, flights)
        self._reset()
        return recording

    def record(self, *args, **kwargs) -> Record:
        record = super().record(*args, **kwargs)
        if self._times is not None:
            # It holds the record, so that no other gets this id.
            self._flights[id(record)] = Flight(record, self._times.now(), self._around)
        return record

    def started(self, records: Sequence[Record], works: Sequence) -> None:
        """Ask the backend to say when it is done. A device's work is done when its queue has waited for it."""
        flights = [self._flights[id(record)] for record in records if id(record) in self._flights]
        if not flights or len(works) != len(flights) or not isinstance(self._times, HostClock):
            return
        for flight, work in zip(flights, works, strict=True):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # gloo's transfers cannot say
                work.get_future().add_done_callback(self._reporter(flight))

    def waited(self, record: Record) -> None:
        super().waited(record)
        flight = self._flights.get(id(record))
        if flight is not None and flight.waited is None:
            flight.waited = self._times.now()

    @contextlib.contextmanager
    def _kept(self, row: list[Span], name: str, what: dict) -> Iterator[None]:
        if self._times is None:
            yield
            return
        times, around = self._times, self._around
        span = Span(name, times.now(), what=around | what)
        row.append(span)
        self._around = span.what
        try:
            yield
        finally:
            span.end, self._around = times.now(), around

    def span(self, name: str, **what: Any) -> contextlib.AbstractContextManager:
        """Within this context the rank does something that has a name."""
        return self._kept(self._spans, name, what)

    def waiting(self, records: Sequence[Record]) -> contextlib.AbstractContextManager:
        """Within this context the rank waits for these operations."""
        return self._kept(self._waits, records[0].name, {"of": list(records)})

    def _reporter(self, flight: Flight):
        now = self._times.now

        def report(_) -> None:  # in a thread of the backend's
            flight.reported = now()

        return report

    def _reset(self) -> None:
        self._begin = None
        self._around: dict[str, Any] = {}
        self._spans: list[Span] = []
        self._waits: list[Span] = []
        self._flights: dict[int, Flight] = {}
