"""Traces: time intervals, a clock common to all ranks, and events in the format of torch's profiler."""

import json

import pytest
import torch

from minidist.comm import Meter, P2POp, all_reduce, batch_send_recv, bind
from minidist.mesh import Mesh
from minidist.tools.trace.chrome import COMMUNICATION, COMPUTE, WAITING, make_trace_events
from minidist.tools.trace.clock import HostClock
from minidist.tools.trace.timed_meter import OperationSpan, RankRecording, TimedMeter, TimedSpan
from minidist.tools.trace.trace import TimeFractions, compute_time_fractions, describe_trace


class Clock:
    """A clock whose times the test sets."""

    def __init__(self):
        self.at = 0

    def __call__(self) -> int:
        return self.at


def record(meter, name="all_reduce", seq=1, rank=0, group_name="grads", **more):
    return meter.record(name, group_name, (0, 1), rank, seq, (8,), torch.float32, **more)


def test_time_shares_add_up_to_the_recorded_time():
    """100 units: 60 of forward and backward with a wait of 20 inside; 30 in flight, of which 10 beside computing."""
    meter = Meter()
    spans = [TimedSpan("step", 0, 100), TimedSpan("forward", 0, 30), TimedSpan("backward", 40, 70)]
    waits = [TimedSpan("all_reduce", 50, 70, {"of": [record(meter)]})]
    flights = [OperationSpan(meter.records[0], 40, {}, reported=None, waited=70)]
    found = compute_time_fractions(RankRecording(0, 100, spans, waits, flights))
    assert found == TimeFractions(
        compute=0.4, exposed_communication=0.2, other=pytest.approx(0.4), hidden_communication=pytest.approx(1 / 3)
    )
    assert compute_time_fractions(RankRecording(0, 100, spans, [], [])) == TimeFractions(0.6, 0.0, 0.4, None)
    told = describe_trace("t.json", (3, 4), [found] * 9)
    assert "steps 3 to 4: t.json" in told and "rank 0 40% / 20% / 40% (33% of communication hidden), " in told
    assert told.endswith("; 1 more ranks in the file") and told.count("\n") == 0


def test_a_meter_keeps_times_only_if_enabled():
    clock, meter = Clock(), TimedMeter()
    with meter.span("before"):
        early = record(meter, seq=1)
    meter.start_recording(HostClock(clock))
    clock.at = 10
    with meter.span("step", step=1):
        clock.at = 12
        mine = record(meter, seq=2)
        with meter.waiting([mine]):
            clock.at = 15
        meter.on_wait_end(early)
        meter.on_wait_end(mine)
    record(meter, seq=3)
    clock.at = 20
    kept = meter.stop_recording(offset_ns=100)
    record(meter, seq=4)
    assert (kept.begin, kept.end) == (100, 120) and not meter.records and meter.operations["grads", "all_reduce"] == 4
    assert early.waited and mine.waited  # the order of events is kept as ever
    assert kept.spans == [TimedSpan("step", 110, 115, {"step": 1})]
    assert kept.waits == [TimedSpan("all_reduce", 112, 115, {"step": 1, "of": [mine]})]
    assert [(f.record.seq, f.launched, f.completion_time, f.attributes) for f in kept.operations] == [
        (2, 112, 115, {"step": 1}),
        (3, 115, None, {}),
    ]


def test_a_meter_without_times_makes_nothing_of_them():
    meter = Meter()
    assert meter.span("a") is meter.waiting([]) is meter.span("b", step=1)
    assert meter.on_launch([], []) is None


class Work:
    """A torch work handle, whose backend reports the end of the operation or does not."""

    def __init__(self, tells: bool):
        self.future = torch.futures.Future() if tells else None

    def get_future(self):
        if self.future is None:
            raise RuntimeError("Work::getFuture not implemented.")
        return self.future


def test_an_operation_ends_when_the_backend_completes_it():
    clock, meter, works = Clock(), TimedMeter(), [Work(True), Work(False)]
    meter.start_recording(HostClock(clock))
    both_launched = [record(meter), record(meter, "send", peer=1)]
    meter.on_launch(both_launched, works)
    clock.at = 3
    works[0].future.set_result(None)
    clock.at = 7
    for one in both_launched:
        meter.on_wait_end(one)
    assert [(flight.launched, flight.completion_time) for flight in meter.stop_recording().operations] == [
        (0, 3),
        (0, 7),
    ]


def told_to_the_meter(world):
    """The launches (operations, tags, torch handles) and waits that the collectives report."""
    meter = TimedMeter()
    group = bind(world, Mesh(dp=world.size), meter=meter)["control"]
    launched, waited = [], []

    on_launch, waiting = meter.on_launch, meter.waiting

    def note_start(records, works):
        launched.append(([(r.name, r.tag) for r in records], len(works)))
        on_launch(records, works)

    def note_wait(records):
        waited.append([r.name for r in records])
        return waiting(records)

    meter.on_launch, meter.waiting = note_start, note_wait
    first, second = torch.ones(2), torch.ones(2)
    handle = all_reduce(first, group, async_op=True)
    batch_send_recv([P2POp("send", first, 1 - world.rank, 3), P2POp("recv", second, 1 - world.rank, 3)], group)
    handle.wait()
    meter.start_recording(HostClock())
    all_reduce(first, group)
    [flight] = meter.stop_recording().operations
    return launched, waited, flight.reported is not None and flight.reported <= flight.waited


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_collectives_report_every_launch_and_wait(ranks, backend):
    for launched, waited, reported in ranks(told_to_the_meter, 2, backend=backend):
        reduced = [("all_reduce", 0)], 1
        assert launched == [reduced, ([("send", 3), ("recv", 3)], 2), reduced]
        assert waited == [["send", "recv"], ["all_reduce"], ["all_reduce"]]
        assert reported or backend == "shm"  # whose handle wakes who waits before it tells anybody else


def recordings():
    """Two ranks with an all-reduce that rank 1 joins later, a concurrent one, a transfer and an unfinished one."""
    meters = [Meter(), Meter()]
    made = []
    for rank, meter in enumerate(meters):
        late = 1000 * rank
        first, second = record(meter, seq=1, rank=rank), record(meter, seq=2, rank=rank)
        other = record(meter, ["send", "recv"][rank], rank=rank, peer=1 - rank, tag=5)
        last = record(meter, "barrier", seq=9, rank=rank, group_name="control")
        flights = [
            OperationSpan(first, 2000 + late, {"step": 1}, waited=6000),
            OperationSpan(second, 4000 + late, {}, reported=8000, waited=9000),
            OperationSpan(other, 10_000 - late, {}, waited=11_000),
            OperationSpan(last, 11_500, {}) if rank else OperationSpan(last, 11_600, {}, waited=11_700),
        ]
        wait = TimedSpan("all_reduce", 5000, 6000, {"step": 1, "of": [first]})
        spans = [
            TimedSpan("step", 1000, 9500, {"step": 1}),
            TimedSpan("forward", 1000, 3000, {"step": 1, "micro_batch": 0}),
        ]
        made.append(RankRecording(1000, 12_000, spans, [wait], flights))
    return made


def test_every_operation_and_every_wait_is_an_event():
    made = make_trace_events(recordings(), ["one", "two"])
    for rank in range(2):
        mine = [event for event in made if event["pid"] == rank + 1 and event["ph"] == "X"]
        flights = [event for event in mine if event["cat"] == "communication"]
        assert [(e["name"], e["tid"], e["ts"]) for e in flights if "all_reduce" in e["name"]] == [
            ("all_reduce grads", COMMUNICATION, 1.0 + rank),
            ("all_reduce grads", COMMUNICATION + 1, 3.0 + rank),
        ]
        first, second = flights[:2]
        assert first["dur"] == 4.0 - rank and first["args"]["completion"] == "end of its wait"
        assert second["dur"] == 4.0 - rank and second["args"]["completion"] == "reported by the backend"
        assert first["args"]["step"] == 1 and first["args"]["sequence number"] == 1
        assert first["args"]["wire bytes"] == first["args"]["payload bytes"] == 32
        [wait] = [event for event in mine if event["tid"] == WAITING]
        assert (wait["name"], wait["ts"], wait["dur"]) == ("wait for all_reduce grads", 4.0, 1.0)
        assert wait["args"] == {"step": 1, "operations": ["all_reduce grads #1"]}
        assert [event["name"] for event in mine if event["tid"] == COMPUTE] == ["step 1", "forward"]
    [unfinished] = [e for e in made if e["ph"] == "X" and e["name"].startswith("barrier") and e["pid"] == 2]
    assert unfinished["ts"] + unfinished["dur"] == 11.0 and "not recorded" in unfinished["args"]["completion"]


def test_an_arrow_leads_from_the_rank_that_launched_first_to_the_last():
    made = make_trace_events(recordings(), ["one", "two"])
    arrows = {}
    for event in made:
        if event["ph"] in "stf":
            arrows.setdefault(event["id"], []).append((event["ph"], event["name"], event["pid"], event["ts"]))
    assert list(arrows.values()) == [
        [("s", "all_reduce grads", 1, 1.0), ("f", "all_reduce grads", 2, 2.0)],
        [("s", "all_reduce grads", 1, 3.0), ("f", "all_reduce grads", 2, 4.0)],
        [("s", "transfer grads", 2, 8.0), ("f", "transfer grads", 1, 9.0)],
        [("s", "barrier control", 2, 10.5), ("f", "barrier control", 1, 10.6)],
    ]


def test_events_have_the_format_of_torchs_profiler(tmp_path):
    """Our events have the keys that all of torch's events of the same kind have, and no others than torch's."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        (torch.ones(4, requires_grad=True) * 2).sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "torch.json"))
    theirs = json.loads((tmp_path / "torch.json").read_text())["traceEvents"]
    ours = json.loads(json.dumps(make_trace_events(recordings(), ["one", "two"])))
    assert {event["ph"] for event in ours} == {"M", "X", "s", "f"} <= {event["ph"] for event in theirs}
    for phase in ("M", "X", "s", "f"):
        keys = [event.keys() for event in theirs if event["ph"] == phase]
        for event in ours:
            if event["ph"] == phase:
                assert set.intersection(*map(set, keys)) <= event.keys() <= set().union(*keys)
                for key, value in event.items():
                    kinds = {type(other[key]) for other in theirs if other["ph"] == phase and key in other}
                    assert type(value) in kinds | ({int, float} if kinds & {int, float} else set()), (phase, key)
    named = {event["name"] for event in theirs if event["ph"] == "M"}
    assert {event["name"] for event in ours if event["ph"] == "M"} <= named
