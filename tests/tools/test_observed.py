"""The order of events and the memory that an exercise's tests observe."""

import importlib

import pytest
import torch
import torch.distributed as dist

from exercises.network import Network
from exercises.observations import DeviceMoveTracker, LiveTensorMemory, PeakMemory, PythonMemory, expect_order, timeline
from exercises.testing import Wrong
from minidist.comm import Meter, all_reduce
from minidist.comm.status import OperationTracker
from minidist.tools.recording_backend import RecordingGroup

KB = 1000


def test_peak_memory_counts_tensors_live_at_one_time():
    with PeakMemory() as memory:
        for _ in range(5):
            kept = torch.zeros(250)
            del kept
        first = torch.zeros(500)
        second = torch.zeros(250)
        del first, second
    assert memory.peak_bytes == 3 * KB


def test_earlier_tensors_are_not_counted():
    before = torch.zeros(2500)
    with PeakMemory() as memory:
        views = before.view(50, 50), before[:10]
    assert memory.peak_bytes == 0 and len(views) == 2


def test_saved_tensors_and_gradients_are_counted():
    x = torch.zeros(250, requires_grad=True)
    with PeakMemory() as memory:
        y = x.exp()
        y.sum().backward()
    # exp is kept, and its gradient is made.
    assert 2 * KB <= memory.peak_bytes < 4 * KB


def test_the_profiler_adds_nothing_to_what_the_code_prints(capfd):
    with PeakMemory():
        print("hello")
    out, err = capfd.readouterr()
    assert (out, err) == ("hello\n", "")


def test_tensors_moved_to_the_device_and_their_results_are_recorded():
    model, there, here = torch.nn.Linear(3, 2), torch.ones(3), torch.ones(3)
    with DeviceMoveTracker() as moved:
        model.to(moved.device)
        there = torch.stack([there.to("cpu:1"), here])
        out = [model(there), torch.zeros(2, device=moved.device), here.view(3, 1)[0]]
        empty = torch.empty(0, 3).to(moved.device)
    assert there in moved and all(parameter in moved for parameter in model.parameters())
    assert [tensor in moved for tensor in out] == [True, True, False]
    assert here not in moved and torch.empty(0, 3) not in moved and empty not in moved


def test_another_name_of_the_cpu_is_not_the_device():
    with DeviceMoveTracker() as moved:
        tensors = [torch.ones(2).to("cpu"), torch.ones(2).to(torch.device("cpu", 0)), torch.ones(2, device="cpu")]
    assert not any(tensor in moved for tensor in tensors)


def record_events(world):
    """Two operations, waited for in the other order, a third not at all, and marks between them; then another test."""
    network = Network(world)
    all_reduce(torch.zeros(1), network.group)
    network.event("before the test")
    network.begin()
    handles = []
    for mark in ("one", "two", "three"):
        network.event(mark)
        handles.append(all_reduce(torch.zeros(4), network.group, async_op=True))
    network.event("wait")
    for handle in reversed(handles[:2]):
        handle.wait()
    happened = timeline(network)
    handles[2].wait()
    network.begin()
    return happened, timeline(network)


def test_the_timeline_has_marks_launches_and_ends_of_waits_in_order(ranks):
    expected = ["one", "launch 0", "two", "launch 1", "three", "launch 2", "wait", "wait 1", "wait 0"]
    assert ranks(record_events, 2, backend=None) == [(expected, [])] * 2


@pytest.mark.parametrize(
    "happened, told",
    [
        (["a", "c"], ("what happens after: a", "b", "c")),
        (["b"], ("what happens after: the beginning", "a", "b")),
        (["a"], ("what happens after: a", "b", "nothing more")),
        (["a", "b", "b"], ("what happens after: b", "nothing more", "b")),
    ],
)
def test_the_first_event_out_of_order_is_reported(happened, told):
    expect_order(["a", "b"], ["a", "b"])
    with pytest.raises(Wrong) as wrong:
        expect_order(happened, ["a", "b"])
    assert (str(wrong.value), wrong.value.expected, wrong.value.got) == told


def test_one_rank_launches_nothing(ranks):
    assert ranks(record_events, 1, backend=None) == [(["one", "two", "three", "wait"], [])]


def test_held_counts_live_tensors_made_inside_the_context():
    before = torch.ones(1000)
    with LiveTensorMemory() as memory:
        assert memory.nbytes() == 0
        row = torch.zeros(256)
        views = [row[:10], row.view(16, 16)]
        assert memory.nbytes() == 1024
        copy = before.clone()
        assert memory.nbytes() == 1024 + 4000
        del copy
        row.untyped_storage().resize_(0)
        assert memory.nbytes() == 0 and len(views) == 2


def test_python_memory_counts_objects_and_not_the_modules_that_a_call_imports(tmp_path, monkeypatch):
    """A first step imports parts of torch, unless another exercise did so before: no verdict may depend on that."""
    (tmp_path / "imported_late.py").write_text("CODE = bytes(2_000_000)\nTABLE = [bytes(1000) for _ in range(500)]\n")
    monkeypatch.syspath_prepend(tmp_path)
    with PythonMemory() as memory:
        kept = [bytes(1_000_000)]
        assert 0 <= memory.nbytes() - 1_000_000 < 50_000
        kept.append(importlib.import_module("imported_late"))
        assert 0 <= memory.nbytes() - 1_000_000 < 50_000
        del kept[0]
        assert memory.nbytes() < 50_000


class SlowGroup(dist.ProcessGroup):
    """A process group that drops the tensors of its operations only when the test says so, as gloo's threads may."""

    def __init__(self):
        super().__init__(0, 1)
        self.kept = []

    def broadcast(self, tensors, opts):
        self.kept.append(torch.futures.Future())
        self.kept[-1].set_result(tensors)  # stored in C++, as by a backend
        return None


def test_held_counts_nothing_that_only_a_backend_still_references():
    inner = SlowGroup()
    group = RecordingGroup(inner, (0,), Meter(), OperationTracker(), "slow", "slow")
    with LiveTensorMemory() as memory:
        sent = torch.zeros(256)
        group.broadcast([sent], dist.BroadcastOptions())
        assert memory.nbytes() == 1024
        del sent
        assert memory.nbytes() == 0 and len(inner.kept) == 1


def test_held_does_not_count_garbage():
    with LiveTensorMemory() as memory:
        cycle = [torch.zeros(256)]
        cycle.append(cycle)
        assert memory.nbytes() == 1024
        del cycle
        assert memory.nbytes() == 0


def test_held_counts_tensors_kept_elsewhere():
    with LiveTensorMemory() as memory:
        parameter = torch.nn.Parameter(torch.zeros(64))
        parameter.grad = torch.zeros(64)
        kept = {"somewhere": [(torch.zeros(64),)]}
        assert memory.nbytes() == 3 * 256 and kept
        parameter.grad = None
        assert memory.nbytes() == 2 * 256
