"""What the ranks did, as events of the Chrome trace format, which Perfetto and chrome://tracing open.

A process per rank, with these lanes: what it computed (nested: a step holds its forwards and backwards), when it waited
for communication, and every operation from its launch to its completion, in as many lanes as are in flight together.
An operation has one name on all ranks, and an arrow joins its launches from the first rank to the last.

Format: "Trace Event Format" (Google, 2016); times in microseconds from the first recorded moment of any rank.
"""

from collections.abc import Iterable, Sequence

from minidist.tools.trace.intervals import lanes
from minidist.tools.trace.timed_meter import Flight, Recording, Span

COMPUTE, WAITING, COMMUNICATION = 1, 2, 3  # thread ids; further lanes of communication follow


def events(recordings: Sequence[Recording], names: Sequence[str]) -> list[dict]:
    """All events, metadata first, then by time, an event before those nested in it.

    recordings: of every rank, in rank order, on one clock; names: what to call the ranks' processes.
    """
    origin = min(recording.begin for recording in recordings)
    named, timed = [], []
    places: dict[tuple, list[tuple[int, int, int]]] = {}  # an operation -> launched, process and lane on each rank
    for rank, recording in enumerate(recordings):
        pid = rank + 1  # Perfetto hides process 0, which it takes for the idle one
        flights = sorted(recording.flights, key=lambda flight: flight.launched)
        ends = [recording.end if flight.completed is None else flight.completed for flight in flights]
        chosen = lanes([(flight.launched, end) for flight, end in zip(flights, ends, strict=True)])
        named += _names(pid, names[rank], rank, max(chosen, default=0) + 1)
        timed += [
            _slice(pid, COMPUTE, _title(s), "compute", s.begin - origin, s.end - origin, s.what)
            for s in recording.spans
        ]
        timed += [_wait(pid, wait, origin) for wait in recording.waits]
        for flight, end, lane in zip(flights, ends, chosen, strict=True):
            tid = COMMUNICATION + lane
            begin = flight.launched - origin
            timed.append(_slice(pid, tid, _name(flight), "communication", begin, end - origin, _facts(flight)))
            places.setdefault(_key(flight, rank), []).append((begin, pid, tid))
    for number, (key, launches) in enumerate(places.items(), start=1):
        timed += _arrow(number, f"{key[0]} {key[1]}", sorted(launches))
    return named + sorted(timed, key=lambda event: (event["ts"], -event.get("dur", 0.0)))


def _names(pid: int, name: str, rank: int, flights: int) -> Iterable[dict]:
    numbered = [f"communication {i + 1}" if i else "communication" for i in range(flights)]
    threads = {COMPUTE: "compute", WAITING: "waiting", **dict(enumerate(numbered, start=COMMUNICATION))}
    yield _metadata(pid, 0, "process_name", name=name)
    yield _metadata(pid, 0, "process_sort_index", sort_index=rank)
    for tid, thread in threads.items():
        yield _metadata(pid, tid, "thread_name", name=thread)
        yield _metadata(pid, tid, "thread_sort_index", sort_index=tid)


def _metadata(pid: int, tid: int, name: str, /, **args) -> dict:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _slice(pid: int, tid: int, name: str, kind: str, begin: int, end: int, args: dict) -> dict:
    """begin, end: nanoseconds."""
    times = {"ts": begin / 1e3, "dur": max(0, end - begin) / 1e3}
    return {"ph": "X", "name": name, "cat": kind, "pid": pid, "tid": tid, **times, "args": args}


def _title(span: Span) -> str:
    return f"step {span.what['step']}" if span.name == "step" else span.name


def _wait(pid: int, wait: Span, origin: int) -> dict:
    facts = {name: value for name, value in wait.what.items() if name != "of"}
    facts["operations"] = [f"{record.name} {record.use} #{record.seq}" for record in wait.what["of"]]
    name = f"wait for {wait.name} {wait.what['of'][0].use}"
    return _slice(pid, WAITING, name, "waiting", wait.begin - origin, wait.end - origin, facts)


def _name(flight: Flight) -> str:
    return f"{flight.record.name} {flight.record.use}"


def _facts(flight: Flight) -> dict:
    record = flight.record
    facts = {
        "operation": record.name,
        "group": record.use,
        "ranks": list(record.ranks),
        "sequence number": record.seq,
        "shape": list(record.shape),
        "dtype": str(record.dtype).removeprefix("torch."),
        "payload bytes": record.payload_bytes,
        "wire bytes": record.wire_bytes,
        "algorithm": f"{record.algorithm}, modelled" if record.modelled else record.algorithm,
    }
    if record.peer is not None:
        facts |= {"peer": record.peer, "tag": record.tag}
    known = "when its wait had ended" if flight.completed is not None else "not seen in the recorded time"
    reported = flight.reported is not None and flight.completed == flight.reported
    return facts | flight.what | {"completion": "reported by the backend" if reported else known}


def _key(flight: Flight, rank: int) -> tuple:
    """What the records of one operation on several ranks have in common."""
    record = flight.record
    if record.peer is None:
        return record.name, record.use, record.ranks, record.seq
    ends = (rank, record.peer) if record.name == "send" else (record.peer, rank)
    return "transfer", record.use, ends, record.tag, record.seq


def _arrow(number: int, name: str, launches: Sequence[tuple[int, int, int]]) -> Iterable[dict]:
    """From the rank that launched first to the one that launched last; none where only one rank was seen."""
    if len(launches) < 2:
        return
    for i, (begin, pid, tid) in enumerate(launches):
        phase = {"ph": "s"} if i == 0 else {"ph": "f", "bp": "e"} if i == len(launches) - 1 else {"ph": "t"}
        yield {**phase, "name": name, "cat": "launches", "id": number, "pid": pid, "tid": tid, "ts": begin / 1e3}
