"""`--trace`: one file per run, complete or absent, with every operation, wait and micro-batch of the traced steps."""

import contextlib
import json
import os
import shutil
import signal
from collections import Counter

import pytest
import torch

from minidist.comm import Meter
from minidist.errors import UserError
from minidist.tools.cli import main, parse_train_options
from minidist.tools.trace.trace import TraceRecorder
from minidist.tools.trace.traffic import traffic_matrix
from tests.helpers.exhaustive import exhaustive
from tests.helpers.small_run import (
    OPTIONS,
    Command,
    Stop,
    descendants,
    make_trainer,
    small_config,
    train_small,
    write_text,
)

STEPS = 3


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def traced(folder, text, **changes):
    expected = {"trace__file": folder / "trace.json", "trace__first": 2, "trace__steps": STEPS}
    return small_config(folder / "run", text, **{**expected, **changes})


def logged(world, config, stop_after=None):
    """Train with a meter that also keeps every record; those of the steps that were traced, and the last line."""
    torch.set_num_threads(1)
    trainer = make_trainer(world, config)
    meter, places = trainer.groups.meter, []
    meter.keep, start, stop = True, meter.start_recording, meter.stop_recording
    meter.start_recording = lambda times: (places.append(len(meter.records)), start(times))
    meter.stop_recording = lambda offset: (places.append(len(meter.records)), stop(offset))[1]
    trainer.run(Stop(stop_after, trainer))
    begun, ended = places or (0, 0)
    return meter.records[begun:ended], trainer.observers[0].summary_line


def read(config):
    assert sorted(path.name for path in config.trace.file.parent.iterdir()) == ["run", "trace.json"]
    return json.loads(config.trace.file.read_text())


def check_form(trace):
    """Check the format: all fields, events in order of time, and no overlap within a lane except nesting."""
    timed = [event for event in trace["traceEvents"] if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    open_until = {}
    for event in trace["traceEvents"]:
        assert event["ph"] in "MXstf" and event["ts"] >= 0 and event["pid"] >= 1 and event["tid"] >= 0 and event["name"]
        if event["ph"] == "X":
            begin, end = round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)  # whole nanoseconds
            assert event["dur"] >= 0
            around = open_until.setdefault((event["pid"], event["tid"]), [])
            while around and around[-1] <= begin:
                around.pop()
            assert not around or end <= around[-1], event
            around.append(end)


def slices(trace, rank, kind):
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == rank + 1 and e["cat"] == kind]


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (1, {}),
        (2, {"comm__gradients": "naive"}),
        *exhaustive((2, {}), (3, {}), (3, {"comm__gradients": "naive"})),
    ],
    ids=str,
)
def test_the_file_holds_what_the_meters_saw(ranks, tmp_path, text, size, changes):
    config = traced(tmp_path, text, **changes)
    by_rank = ranks(logged, size, config)
    trace = read(config)
    check_form(trace)
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {rank + 1: f"rank {rank} on cpu, node 0" for rank in range(size)}
    for rank, (records, _) in enumerate(by_rank):
        assert bool(records) == (size > 1)
        found = [event["args"] for event in slices(trace, rank, "communication")]
        keys = ("operation", "group", "sequence number", "payload bytes", "wire bytes")
        seen = Counter((*(facts[key] for key in keys), facts.get("peer")) for facts in found)
        assert seen == Counter((r.name, r.group_name, r.seq, r.payload_bytes, r.wire_bytes, r.peer) for r in records)
        assert all("not recorded" not in facts["completion"] for facts in found)
        waits = [f for wait in slices(trace, rank, "waiting") for f in wait["args"]["operations"]]
        assert sorted(waits) == sorted(f"{r.name} {r.group_name} #{r.seq}" for r in records)
    assert trace["otherData"]["traffic_bytes"] == traffic_matrix([records for records, _ in by_rank])
    lines = [line for _, line in by_rank]
    assert lines[1:] == [None] * (size - 1) and f"trace of steps 2 to 4: {config.trace.file}, for" in lines[0]
    assert f"rank {size - 1} " in lines[0] and f"rank {size} " not in lines[0]
    assert ("of communication hidden" in lines[0]) == (size > 1)
    for share in trace["otherData"]["time_fractions"]:
        assert share["compute"] > 0 and share["exposed_communication"] + share["compute"] + share[
            "other"
        ] == pytest.approx(1)
        assert share["hidden_communication"] is None if size == 1 else 0 <= share["hidden_communication"] < 1


@pytest.mark.parametrize("size", [1, 2])
def test_every_micro_batch_has_its_forward_and_its_backward_inside_its_step(ranks, tmp_path, text, size):
    config = traced(tmp_path, text, train__micro_batches=3, checkpoint__every=3)
    ranks(train_small, size, config)
    trace = read(config)
    for rank in range(size):
        computed = slices(trace, rank, "compute")
        steps = [event for event in computed if event["name"].startswith("step")]
        assert [event["name"] for event in steps] == ["step 2", "step 3", "step 4"]
        for step in steps:
            end = step["ts"] + step["dur"]
            inside = [e for e in computed if e is not step and step["ts"] <= e["ts"] < end]
            assert all(event["args"]["step"] == step["args"]["step"] for event in inside)
            passes = [(event["name"], event["args"].get("micro_batch")) for event in inside]
            per_batch = [(name, i) for i in range(3) for name in ("forward", "backward")]
            per_step = [(name, None) for name in ("reduce", "gradient norm", "optimizer", "gather")]
            assert passes == [("data", None), *per_batch, *per_step]
        [saved] = [event for event in computed if event["name"] == "checkpoint"]
        assert "step" not in saved["args"] and steps[1]["ts"] < saved["ts"] < steps[2]["ts"]


def held_up(world, config):
    """Rank 1 does not come to the end of its first backward before rank 0 waits for its gradients."""
    trainer = make_trainer(world, config)
    meter, store, waiting = trainer.groups.meter, world.store, trainer.groups.meter.waiting
    if world.rank == 0:

        @contextlib.contextmanager
        def tell(records):
            with waiting(records):
                if records[0].group_name == "grads":
                    store.set("rank 0 waits", "yes")
                yield

        meter.waiting = tell
    else:
        embedding = trainer.engine.model.model.embed_tokens.weight  # whose gradient comes last
        embedding.register_hook(lambda _: store.wait(["rank 0 waits"]))
    trainer.run(Stop())


def test_a_delayed_rank_makes_the_other_wait(ranks, tmp_path, text):
    config = traced(tmp_path, text, trace__first=1, trace__steps=1)
    ranks(held_up, 2, config)
    trace = read(config)
    [first, second] = ([e for e in slices(trace, r, "communication") if e["args"]["group"] == "grads"] for r in (0, 1))
    wait = next(e for e in slices(trace, 0, "waiting") if e["name"] == "wait for all_reduce grads")
    late = second[0]
    assert first[0]["ts"] <= wait["ts"] < late["ts"] < wait["ts"] + wait["dur"]
    [arrow] = [
        e for e in trace["traceEvents"] if e["ph"] == "f" and e["ts"] == late["ts"] and e["name"] == late["name"]
    ]
    assert arrow["pid"] == 2  # the last to come
    backward = next(e for e in slices(trace, 1, "compute") if e["name"] == "backward")
    assert wait["ts"] < backward["ts"] + backward["dur"]  # it may even begin before that backward does
    other = trace["otherData"]
    assert (
        other["time_fractions"][0]["exposed_communication"] * other["recorded_ns"][0] >= (late["ts"] - wait["ts"]) * 1e3
    )


def test_a_run_that_is_asked_to_stop_writes_the_steps_it_made(ranks, tmp_path, text):
    config = traced(tmp_path, text, trace__steps=1000, train__steps=1000)
    [(_, line), _] = ranks(logged, 2, config, 4)
    check_form(read(config))
    assert "trace of steps 2 to 4" in line and read(config)["otherData"]["steps"] == [2, 4]


def test_a_run_that_is_stopped_before_the_first_traced_step_says_so(ranks, tmp_path, text):
    config = traced(tmp_path, text, trace__first=5)
    [(records, line), _] = ranks(logged, 2, config, 2)
    assert line == "no trace: the run ended after step 2, before --trace.first 5" and not config.trace.file.exists()


LONG = ("--train.steps", "1000000", "--trace.steps", "1000000", "--train.log-every", "1", "--folder", "run")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_dies_leaves_no_file_and_a_run_that_is_stopped_a_whole_one(tmp_path, number):
    text = write_text(tmp_path)
    with Command("train", *OPTIONS, *LONG, "--trace", "t.json", "--data.path", text, folder=tmp_path) as command:
        command.read_until("step      2 ")
        if number == signal.SIGTERM:
            os.kill(command.process.pid, number)
        else:
            below = descendants(command.process.pid)
            rank = next(pid for pid, parent in below.items() if parent in below)  # the server's child
            os.kill(rank, number)
        assert command.end() == (0 if number == signal.SIGTERM else 1), command.output
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["run", *(["t.json"] if number == signal.SIGTERM else []), text.name]
    if number == signal.SIGTERM:
        check_form(json.loads((tmp_path / "t.json").read_text()))
        assert "trace of steps 1 to" in command.output


@pytest.mark.exhaustive
def test_under_torchrun_there_is_one_file_of_all_ranks(tmp_path):
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "minidist")
    more = ("--train.steps", "3", "--folder", "run", "--trace", "t.json", "--data.path", write_text(tmp_path))
    with Command("train", *OPTIONS, *more, module=torchrun, folder=tmp_path) as command:
        assert command.end() == 0, command.output
    trace = json.loads((tmp_path / "t.json").read_text())
    check_form(trace)
    assert {event["pid"] for event in trace["traceEvents"]} == {1, 2} and trace["otherData"]["steps"] == [1, 3]
    assert slices(trace, 1, "communication") and command.output.count("trace of steps 1 to 3") == 1


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("text-0.txt", "text-0.txt exists already: remove it, or give the trace another name"),
        ("no/t.json", "no/t.json cannot be written: No such file or directory. Give a file in a folder that exists"),
        ("text-0.txt/t.json", "cannot be written: Not a directory"),
        (".", ". exists already"),
    ],
)
def test_an_unwritable_path_is_refused_before_training(tmp_path, monkeypatch, capsys, file, message):
    write_text(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["train", *OPTIONS, "--data.path", "text-0.txt", "--trace", file]) == 2
    output = capsys.readouterr()
    assert message in output.err and not output.out and [path.name for path in tmp_path.iterdir()] == ["text-0.txt"]


def refuse(world, config):
    try:
        make_trainer(world, config)
    except UserError as error:
        return str(error)


def test_a_path_that_rank_0_cannot_write_is_refused_on_all_ranks(ranks, tmp_path, text):
    first, second = ranks(refuse, 2, traced(tmp_path, text, trace__file=tmp_path / "no" / "t.json"))
    assert first == second and "rank 0: --trace" in first and not list(tmp_path.iterdir())


def with_a_file_in_place_of_its_folder(world, config):
    trainer = make_trainer(world, config)
    if world.rank == 0:
        shutil.rmtree(config.trace.file.parent)
        config.trace.file.parent.touch()
    return trainer.run(Stop())["step"], trainer.observers[0].summary_line


def test_a_trace_that_cannot_be_written_in_the_end_does_not_end_the_run(ranks, tmp_path, text):
    (tmp_path / "gone").mkdir()
    config = traced(tmp_path, text, trace__file=tmp_path / "gone" / "t.json")
    (step, line), _ = ranks(with_a_file_in_place_of_its_folder, 2, config)
    assert step == 6 and line == f"the trace {config.trace.file} could not be written: File exists"


def test_what_cannot_be_traced_is_refused(tmp_path, capsys):
    for options, message in (
        (["--trace.first", "601"], "trace.first is 601, but the run ends at step 600: no step would be recorded"),
        (["--trace.steps", "0"], "trace.steps is 0; it must be 1 or more"),
        (["--trace.first", "0"], "trace.first is 0; it must be 1 or more"),
    ):
        assert main(["train", "--trace", str(tmp_path / "t.json"), *options]) == 2
        assert message in capsys.readouterr().err


def test_the_short_option_is_the_long_one(tmp_path):
    for words in (["--trace", "a.json"], ["--trace=a.json"], ["--trace.file", "a.json"]):
        config, _ = parse_train_options([*words, "--trace.steps", "4"])
        assert (str(config.trace.file), config.trace.steps) == ("a.json", 4)


def plain(world, config):
    trainer = make_trainer(world, config)
    trainer.run(Stop())
    traces = any(isinstance(observer, TraceRecorder) for observer in trainer.observers)
    return type(trainer.groups.meter), trainer.groups.meter.records, traces


def test_without_trace_nothing_is_recorded_and_a_resumed_run_does_not_trace_again(ranks, tmp_path, text):
    config = traced(tmp_path, text, train__steps=4)
    ranks(train_small, 2, config)
    assert "trace.json" not in (config.folder / "config.toml").read_text()
    untraced = small_config(tmp_path / "other", text)
    assert ranks(plain, 2, untraced) == [(Meter, [], False)] * 2
