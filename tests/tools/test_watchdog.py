"""The watchdog: deadlock detection through a store, with simulated ranks and a virtual clock."""

import threading

import pytest

from minidist.comm.status import Channel
from minidist.tools.deadlock.status_page import StatusPage
from minidist.tools.deadlock.watchdog import Watchdog
from tests.helpers.status_pages import GRADS, mark_waiting
from tests.helpers.watch import SimulatedRanks, Store

pytestmark = pytest.mark.process_lifecycle

PAIR = Channel("collective", "grads", (0, 1))


def test_one_rank_reports_a_mismatch_for_all_with_both_texts():
    world = SimulatedRanks(2)
    mark_waiting(world.pages[1], PAIR)
    mark_waiting(world.pages[0], PAIR, name="broadcast", where="other.py:9")
    assert world.run(5).splitlines() == [
        "mismatch: operation #1 of 'grads' (ranks 0-1) is not the same on ranks 0 and 1",
        "  rank 0: broadcast (4,) float32, waiting at other.py:9",
        "  rank 1: all_reduce (4,) float32, waiting at train.py:7",
        "every rank of a group must launch the same operations, of the same shape and dtype, in the same order",
    ]
    assert len(world.reports) == 1


def test_a_deadlock_is_reported_within_about_a_second_with_the_texts_of_all_ranks():
    world = SimulatedRanks(3)
    mark_waiting(world.pages[0], GRADS)
    mark_waiting(world.pages[2], GRADS, where="other.py:9")
    world.end(1)
    assert world.run(5).splitlines() == [
        "deadlock: ranks 0, 2 wait for something that can never happen",
        "  rank 0: waiting in all_reduce #1 (4,) float32 of 'grads' (ranks 0-2) at train.py:7",
        "  rank 1: returned",
        "  rank 2: waiting in all_reduce #1 (4,) float32 of 'grads' (ranks 0-2) at other.py:9",
        "rank 1 returned without launching all_reduce #1 of 'grads'",
    ]
    assert world.now_s <= 1.2


def test_a_rank_that_runs_is_no_deadlock_and_one_that_resumed_is_not_taken_for_waiting():
    world = SimulatedRanks(2)
    mark_waiting(world.pages[0], PAIR)
    assert world.run(3) is None
    # Rank 0 resumes, and rank 1 waits in an operation that differs: rank 0 may still launch the right one.
    world.pages[0].on_resume()
    mark_waiting(world.pages[1], Channel("collective", "other", (0, 1)))
    assert world.run(3) is None


def test_a_status_that_is_out_of_date_does_not_count():
    """Rank 1 is posted as waiting, but its watchdog no longer answers: it may have gone on."""
    world = SimulatedRanks(2)
    mark_waiting(world.pages[1], PAIR, shape=(9,))
    world.run(1)
    world.silent.add(1)
    mark_waiting(world.pages[0], PAIR)
    assert world.run(10) is None
    world.silent.clear()
    assert "mismatch" in world.run(2)


def test_a_rank_that_moves_between_the_readings_is_asked_again():
    world = SimulatedRanks(2)
    mark_waiting(world.pages[0], PAIR)
    mark_waiting(world.pages[1], PAIR, shape=(9,))
    world.run(0.6)  # both have posted
    world.silent.add(1)
    assert world.run(1) is None
    assert world.participants[0]._leader._suspected
    world.silent.clear()
    world.pages[1].on_resume()  # it goes on, and waits in the same operation again
    world.pages[1].on_wait(PAIR, 1, "all_reduce", (9,), "float32", "train.py:7")
    assert world.run(0.4) is None
    assert "mismatch" in world.run(3)


def test_a_rank_about_to_join_is_waited_for():
    world = SimulatedRanks(3)
    mark_waiting(world.pages[0], GRADS)
    world.end(1)
    assert world.run(0.9) is None
    mark_waiting(world.pages[2], GRADS)
    assert "deadlock: ranks 0, 2" in world.run(5)


def test_a_deadlock_is_reported_though_another_rank_works_on_and_on():
    world = SimulatedRanks(3)
    mark_waiting(world.pages[0], GRADS)
    world.end(1)
    assert "deadlock: rank 0 waits" in world.run(5) and world.now_s < 3


def test_another_rank_takes_over_from_a_leader_that_is_stopped_or_resumes():
    ranks = tuple(range(4))
    channel = Channel("collective", "grads", ranks)
    for how in ("stopped", "resumes"):
        world = SimulatedRanks(4)
        mark_waiting(world.pages[0], channel)
        world.run(1)
        assert world.participants[0]._leader
        if how == "stopped":
            world.silent.add(0)
        else:
            world.pages[0].on_resume()
        pair = Channel("collective", "pair", (1, 2))
        mark_waiting(world.pages[1], pair)
        mark_waiting(world.pages[2], pair, shape=(7,))
        assert "operation #1 of 'pair'" in world.run(5)


def test_a_wait_longer_than_the_timeout_is_reported_by_its_own_rank():
    world = SimulatedRanks(2, timeout_s=4.0)
    mark_waiting(world.pages[0], PAIR)
    assert "after 4 s in one wait\n  rank 0: waiting in all_reduce #1" in world.run(6)


def test_many_groups_of_a_large_job_give_the_report_of_the_whole_in_few_lines():
    size = 64
    world = SimulatedRanks(size)
    for rank, page in enumerate(world.pages):
        first = rank // 8 * 8
        channel = Channel("collective", "tp", tuple(range(first, first + 8)))
        if rank != 13:
            mark_waiting(page, channel, where="layer.py:3")
    world.end(13)
    report = world.run(10)
    assert report.splitlines()[0] == "deadlock: ranks 8-12, 14-15 wait for something that can never happen"
    assert "all_reduce #1 (4,) float32 of 'tp' (ranks 8-15) at layer.py:3" in report
    assert report.endswith("rank 13 returned without launching all_reduce #1 of 'tp'")


@pytest.mark.parametrize("size", [8, 64])
def test_the_operations_on_the_store_per_rank_and_second_do_not_grow_with_the_ranks(size):
    world = SimulatedRanks(size)
    ranks = Channel("collective", "grads", tuple(range(size)))
    for page in world.pages[:-1]:
        mark_waiting(page, ranks)  # the last rank is slow
    world.run(2)
    world.store.operations.clear()
    world.run(10)
    assert world.store.operations["multi_get"] <= 100  # the leader reads the slow rank alone
    readings = 10 / world.participants[0].period_s
    assert world.store.operations.total() <= (size + 8) * readings  # one per rank, and those of the leader


def test_the_threads_report_once_and_end(monkeypatch):
    store, reports, done = Store(), [], threading.Event()

    def end(rank):
        return lambda report: (reports.append((rank, report)), done.set())

    pages = [StatusPage(), StatusPage()]
    dogs = [Watchdog(rank, 2, pages[rank], store, on_report=end(rank)) for rank in range(2)]
    mark_waiting(pages[1], PAIR)
    mark_waiting(pages[0], PAIR, name="broadcast")
    assert done.wait(20)
    pages[1].record_end("returned")
    pages[0].record_end("returned")
    threads = [threading.Thread(target=dog.wait_until_all_ranks_end) for dog in dogs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert len(reports) == 1 and "mismatch: operation #1" in reports[0][1]
