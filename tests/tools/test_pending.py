"""Operations pending on a GPU, whose wait has returned: found from works that are made up. No GPU is used."""

from types import SimpleNamespace

import pytest
import torch

from minidist.comm import Meter
from minidist.comm.handles import Handle, LaunchedOperation
from minidist.comm.status import Channel
from minidist.tools.deadlock.status_page import StatusPage
from tests.helpers.watch import SimulatedRanks

GRADS, CONTROL = (Channel("collective", name, (0, 1, 2)) for name in ("grads", "control"))


class Work:
    """torch's handle of an operation on a GPU: `wait` returns at once."""

    def __init__(self, completed=False):
        self.completed = completed

    def wait(self):
        return True

    def is_completed(self):
        return self.completed


def launch(page, channel, name="all_reduce", shape=(4,), where="train.py:7"):
    """Launch an operation, wait for it as the stream does, and return its work."""
    work = Work()
    seq = page.on_launch(channel, name, shape, "float32")
    page.on_wait(channel, seq, name, shape, "float32", where)
    page.on_pending(channel, seq, name, shape, "float32", work)
    page.on_resume()
    return work


def wait_on_host(page, channel):
    seq = page.on_launch(channel, "all_reduce", (1,), "float64")
    page.on_wait(channel, seq, "all_reduce", (1,), "float64", "agree.py:3")


def test_a_rank_whose_gpu_has_not_completed_an_operation_is_pending_until_it_has():
    page = StatusPage()
    page.track_pending_operations()
    page.on_resume()
    first, second = launch(page, GRADS), launch(page, GRADS, shape=(5,))
    before = page.poll_pending_and_get_version()
    snapshot = page.take_snapshot()
    assert (snapshot.state, snapshot.wait_channel, snapshot.wait_seq) == ("pending", GRADS, 1)
    assert snapshot.progress_on(GRADS)[::2] == (2, 2)
    assert page.is_blocked and StatusPage.read_snapshot(page.to_bytes()) == snapshot
    launch(page, CONTROL)  # the host goes on, the oldest operation is the same
    assert page.poll_pending_and_get_version() == before and page.take_snapshot().version == snapshot.version
    first.completed = True
    assert page.poll_pending_and_get_version() != before
    assert page.take_snapshot().wait_operation == "all_reduce (5,) float32"
    second.completed = True
    page.poll_pending_and_get_version()
    assert page.take_snapshot().wait_channel == CONTROL


def test_without_a_watchdog_no_work_is_kept():
    page = StatusPage()
    page.on_resume()
    launch(page, GRADS)
    assert page.take_snapshot().state == "running" and not page.is_blocked


def test_an_operation_that_an_ended_rank_has_not_launched_is_lost_although_the_others_run():
    world = SimulatedRanks(3)
    for rank in (0, 1):
        launch(world.pages[rank], GRADS)
    world.end(2)
    assert world.run(5).splitlines() == [
        "deadlock: ranks 0-1 wait for something that can never happen",
        "  ranks 0-1: running, but the GPU has not completed "
        "all_reduce #1 (4,) float32 of 'grads' (ranks 0-2) at train.py:7",
        "  rank 2: returned",
        "rank 2 returned without launching all_reduce #1 of 'grads'",
    ]


def test_a_skipped_collective_blocks_the_operations_behind_it_on_the_gpu():
    """Rank 2 skips one all-reduce; all ranks then block in the next step's agreement, which all have launched."""
    world = SimulatedRanks(3)
    for rank, page in enumerate(world.pages):
        if rank != 2:
            launch(page, GRADS)
        wait_on_host(page, CONTROL)
    report = world.run(5)
    assert report.startswith("deadlock: ranks 0-2 wait for something that can never happen")
    assert "ranks 0-1: waiting in all_reduce #1 (4,) float32 of 'grads' (ranks 0-2) at train.py:7" in report
    assert "rank 2: waiting in all_reduce #1 (1,) float64 of 'control' (ranks 0-2) at agree.py:3" in report


def test_different_pending_operations_are_a_mismatch():
    world = SimulatedRanks(3)
    launch(world.pages[0], GRADS)
    launch(world.pages[1], GRADS, name="broadcast")
    assert "mismatch: operation #1 of 'grads' (ranks 0-2) is not the same on ranks 0 and 1" in world.run(5)


@pytest.mark.parametrize("all_launched", [True, False])
def test_a_slow_rank_or_a_slow_operation_is_no_deadlock(all_launched):
    world = SimulatedRanks(3)
    works = [launch(page, GRADS) for rank, page in enumerate(world.pages) if all_launched or rank != 2]
    for page in world.pages[:2]:
        wait_on_host(page, CONTROL)
    assert world.run(8) is None
    if not all_launched:
        works.append(launch(world.pages[2], GRADS))
    for work in works:
        work.completed = True
    wait_on_host(world.pages[2], CONTROL)
    assert world.run(3) is None


def test_the_wait_of_a_handle_reports_what_the_gpu_has_not_completed():
    page, work = StatusPage(), Work()
    page.track_pending_operations()
    page.on_resume()
    record = SimpleNamespace(waited=None)
    at = LaunchedOperation(
        GRADS, page.on_launch(GRADS, "all_reduce", (4,), "float32"), "all_reduce", (4,), "float32", record
    )
    group = SimpleNamespace(world=SimpleNamespace(status=page, must_abandon=None), meter=Meter())
    Handle(group, [work], [at], [SimpleNamespace(is_cuda=True)]).wait()
    assert page.take_snapshot().state == "pending"
    work.completed = True
    page.poll_pending_and_get_version()
    assert page.take_snapshot().state == "running"
    at = LaunchedOperation(
        GRADS, page.on_launch(GRADS, "all_reduce", (4,), "float32"), "all_reduce", (4,), "float32", record
    )
    Handle(group, [Work()], [at], [torch.zeros(4)]).wait()  # on the CPU the wait is over when it returns
    assert page.take_snapshot().state == "running"
