"""Recordings as events of the Chrome trace format, which Perfetto and chrome://tracing open.

Each rank is a process with these threads: computation (nested: a step contains its forwards and backwards), waits for
communication, and operations from launch to completion, in as many threads as are in flight at once. An operation has
the same name on all ranks; an arrow joins its launches from the first rank to the last.

Format: "Trace Event Format" (Google, 2016); times in microseconds from the first recorded time of any rank.
"""

from collections.abc import Iterable, Sequence

from minidist.tools.trace.intervals import assign_lanes
from minidist.tools.trace.timed_meter import OperationSpan, RankRecording, TimedSpan

COMPUTE, WAITING, COMMUNICATION = 1, 2, 3  # thread ids; further lanes of communication follow


def make_trace_events(recordings: Sequence[RankRecording], rank_names: Sequence[str]) -> list[dict]:
    """Return the events of a Chrome trace file: metadata first, then sorted by time, outer events before nested ones.

    recordings: the recording of every rank, in rank order, in times of one clock. rank_names: the display name of each
    rank.
    """
    origin = min(recording.begin for recording in recordings)
    metadata, timed = [], []
    launches: dict[tuple, list[tuple[int, int, int]]] = {}  # operation -> (launch, process, thread) on each rank
    for rank, recording in enumerate(recordings):
        pid = rank + 1  # Perfetto hides process 0
        operations = sorted(recording.operations, key=lambda operation: operation.launched)
        ends = [
            recording.end if operation.completion_time is None else operation.completion_time
            for operation in operations
        ]
        lanes = assign_lanes([(operation.launched, end) for operation, end in zip(operations, ends, strict=True)])
        metadata += _make_process_metadata(pid, rank_names[rank], rank, max(lanes, default=0) + 1)
        timed += [
            _make_slice(pid, COMPUTE, _format_span_title(s), "compute", s.begin - origin, s.end - origin, s.attributes)
            for s in recording.spans
        ]
        timed += [_make_wait_slice(pid, wait, origin) for wait in recording.waits]
        for operation, end, lane in zip(operations, ends, lanes, strict=True):
            tid = COMMUNICATION + lane
            begin = operation.launched - origin
            timed.append(
                _make_slice(
                    pid,
                    tid,
                    _format_operation_name(operation),
                    "communication",
                    begin,
                    end - origin,
                    _make_operation_arguments(operation),
                )
            )
            launches.setdefault(_operation_key(operation, rank), []).append((begin, pid, tid))
    for number, (key, by_rank) in enumerate(launches.items(), start=1):
        timed += _make_flow_events(number, f"{key[0]} {key[1]}", sorted(by_rank))
    return metadata + sorted(timed, key=lambda event: (event["ts"], -event.get("dur", 0.0)))


def _make_process_metadata(pid: int, name: str, rank: int, operations: int) -> Iterable[dict]:
    """Yield the events that name a rank's process and its threads.

    pid, name, rank: of the process. operations: how many threads the operations in flight need.
    """
    numbered = [f"communication {i + 1}" if i else "communication" for i in range(operations)]
    threads = {COMPUTE: "compute", WAITING: "waiting", **dict(enumerate(numbered, start=COMMUNICATION))}
    yield _make_metadata_event(pid, 0, "process_name", name=name)
    yield _make_metadata_event(pid, 0, "process_sort_index", sort_index=rank)
    for tid, thread in threads.items():
        yield _make_metadata_event(pid, tid, "thread_name", name=thread)
        yield _make_metadata_event(pid, tid, "thread_sort_index", sort_index=tid)


def _make_metadata_event(pid: int, tid: int, name: str, /, **args) -> dict:
    """Return a metadata event of the trace format, such as the name of a process or thread."""
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _make_slice(pid: int, tid: int, name: str, kind: str, begin: int, end: int, args: dict) -> dict:
    """Return the event of a bar (a "slice") in thread `tid`. kind: its category. begin, end: nanoseconds."""
    times = {"ts": begin / 1e3, "dur": max(0, end - begin) / 1e3}
    return {"ph": "X", "name": name, "cat": kind, "pid": pid, "tid": tid, **times, "args": args}


def _format_span_title(span: TimedSpan) -> str:
    """Return the name of a computation in the trace: "step 3" for a step."""
    return f"step {span.attributes['step']}" if span.name == "step" else span.name


def _make_wait_slice(pid: int, wait: TimedSpan, origin: int) -> dict:
    """Return the event of a wait for communication. origin: the trace's time 0, in nanoseconds."""
    facts = {name: value for name, value in wait.attributes.items() if name != "of"}
    facts["operations"] = [f"{record.name} {record.group_name} #{record.seq}" for record in wait.attributes["of"]]
    name = f"wait for {wait.name} {wait.attributes['of'][0].group_name}"
    return _make_slice(pid, WAITING, name, "waiting", wait.begin - origin, wait.end - origin, facts)


def _format_operation_name(operation: OperationSpan) -> str:
    """Return the name of an operation in the trace: the operation and its group."""
    return f"{operation.record.name} {operation.record.group_name}"


def _make_operation_arguments(operation: OperationSpan) -> dict:
    """Return what the trace viewer shows about an operation: shape, dtype, bytes, times, ..."""
    record = operation.record
    facts = {
        "operation": record.name,
        "group": record.group_name,
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
    known = "end of its wait" if operation.completion_time is not None else "not recorded"
    reported = operation.reported is not None and operation.completion_time == operation.reported
    return facts | operation.attributes | {"completion": "reported by the backend" if reported else known}


def _operation_key(operation: OperationSpan, rank: int) -> tuple:
    """Return a key that is equal for the records of one operation on all its ranks."""
    record = operation.record
    if record.peer is None:
        return record.name, record.group_name, record.ranks, record.seq
    ends = (rank, record.peer) if record.name == "send" else (record.peer, rank)
    return "transfer", record.group_name, ends, record.tag, record.seq


def _make_flow_events(number: int, name: str, launches: Sequence[tuple[int, int, int]]) -> Iterable[dict]:
    """Yield the events of an arrow from the first launch to the last; none if only one rank launched.

    number: of the arrow. launches: (time, pid, tid) of each rank's launch.
    """
    if len(launches) < 2:
        return
    for i, (begin, pid, tid) in enumerate(launches):
        phase = {"ph": "s"} if i == 0 else {"ph": "f", "bp": "e"} if i == len(launches) - 1 else {"ph": "t"}
        yield {**phase, "name": name, "cat": "launches", "id": number, "pid": pid, "tid": tid, "ts": begin / 1e3}
