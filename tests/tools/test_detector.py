"""Deadlock detection from hand-written status pages, without a process."""

from dataclasses import replace

from minidist.comm.status import Channel
from minidist.errors import format_ranks
from minidist.tools.deadlock.detector import DeadlockDetector, detect_deadlock
from minidist.tools.deadlock.status_page import StatusPage
from tests.helpers.status_pages import GRADS, mark_returned, mark_waiting, take_snapshots


def test_a_rank_that_waits_for_one_that_returned_is_deadlocked():
    verdict = detect_deadlock(
        take_snapshots(r0=mark_waiting(StatusPage(), GRADS), r1=mark_returned(), r2=mark_waiting(StatusPage(), GRADS))
    )
    assert (verdict.kind, verdict.ranks) == ("deadlock", (0, 2))
    assert verdict.text.splitlines() == [
        "deadlock: ranks 0, 2 wait for something that can never happen",
        "  ranks 0, 2: waiting in all_reduce #1 (4,) float32 of 'grads' (ranks 0-2) at train.py:7",
        "  rank 1: returned",
        "rank 1 returned without launching all_reduce #1 of 'grads'",
    ]


def test_an_unseen_rank_is_not_deadlocked():
    assert (
        detect_deadlock(take_snapshots(r0=mark_waiting(StatusPage(), GRADS), r1=mark_waiting(StatusPage(), GRADS)))
        is None
    )


def test_a_running_rank_is_not_deadlocked():
    running = StatusPage()
    running.on_resume()
    assert (
        detect_deadlock(
            take_snapshots(r0=mark_waiting(StatusPage(), GRADS), r1=running, r2=mark_waiting(StatusPage(), GRADS))
        )
        is None
    )


def test_all_ranks_waiting_in_one_operation_are_not_deadlocked():
    assert detect_deadlock(take_snapshots(**{f"r{r}": mark_waiting(StatusPage(), GRADS) for r in range(3)})) is None


def test_a_returned_rank_that_launched_its_operation_is_not_missing():
    early = StatusPage()
    early.on_launch(GRADS, "all_reduce", (4,), "float32")
    pages = take_snapshots(
        r0=mark_waiting(StatusPage(), GRADS), r1=mark_returned(early), r2=mark_waiting(StatusPage(), GRADS)
    )
    assert detect_deadlock(pages) is None


def test_a_rank_whose_wait_will_end_is_not_missing():
    pair = Channel("collective", "pair", (1, 3))
    pages = take_snapshots(
        r0=mark_waiting(StatusPage(), GRADS), r1=mark_waiting(StatusPage(), pair), r2=mark_waiting(StatusPage(), GRADS)
    )
    served = {**pages, 3: mark_waiting(StatusPage(), pair).take_snapshot()}
    assert detect_deadlock(served) is None


def test_a_chain_of_waits_ends_at_the_rank_that_died():
    pair = Channel("collective", "pair", (1, 3))
    pages = take_snapshots(
        r0=mark_waiting(StatusPage(), GRADS), r1=mark_waiting(StatusPage(), pair), r2=mark_waiting(StatusPage(), GRADS)
    )
    verdict = detect_deadlock({**pages, 3: replace(StatusPage().take_snapshot(), state="died")})
    assert verdict.ranks == (0, 1, 2)
    assert verdict.text.endswith("rank 3 died without launching all_reduce #1 of 'pair'")


def test_one_lost_member_is_enough_while_another_still_works():
    pages = take_snapshots(r0=mark_waiting(StatusPage(), GRADS), r1=mark_returned())  # rank 2 runs
    assert detect_deadlock(pages).ranks == (0,)


def test_a_recv_is_served_by_the_send_of_its_tag_only():
    def recv(tag):
        return mark_waiting(StatusPage(), Channel("recv", "pp", (0, 1), 1, tag), "recv")

    sender = StatusPage()
    sender.on_launch(Channel("send", "pp", (0, 1), 0, 3), "send", (4,), "float32")
    sender.record_end("returned")
    assert detect_deadlock(take_snapshots(r0=recv(3), r1=sender)) is None
    assert "without launching send #1 to rank 0 of 'pp'" in detect_deadlock(take_snapshots(r0=recv(4), r1=sender)).text


def test_a_second_recv_needs_a_second_send():
    receiver, channel = StatusPage(), Channel("recv", "pp", (0, 1), 1)
    receiver.on_launch(channel, "recv", (4,), "float32")
    mark_waiting(receiver, channel, "recv")
    sender = StatusPage()
    sender.on_launch(Channel("send", "pp", (0, 1), 0), "send", (4,), "float32")
    assert "send #2" in detect_deadlock(take_snapshots(r0=receiver, r1=mark_returned(sender))).text


def test_another_shape_at_the_same_place_is_a_mismatch():
    verdict = detect_deadlock(
        take_snapshots(r0=mark_waiting(StatusPage(), GRADS), r1=mark_waiting(StatusPage(), GRADS, shape=(5,)))
    )
    assert (verdict.kind, verdict.ranks) == ("mismatch", (0, 1))
    assert "rank 0: all_reduce (4,) float32" in verdict.text and "rank 1: all_reduce (5,) float32" in verdict.text


def test_a_mismatch_is_found_although_one_rank_is_already_further():
    ahead = StatusPage()
    ahead.on_launch(GRADS, "broadcast", (4,), "float32")
    ahead.on_launch(GRADS, "all_reduce", (4,), "float32")
    verdict = detect_deadlock(take_snapshots(r0=mark_waiting(StatusPage(), GRADS), r1=mark_returned(ahead)))
    assert verdict.kind == "mismatch" and "operation #1 of 'grads'" in verdict.text


def test_a_send_and_a_recv_of_as_many_elements_match():
    send = mark_waiting(StatusPage(), Channel("send", "pp", (0, 1), 1), "send", (2, 4))
    recv = mark_waiting(StatusPage(), Channel("recv", "pp", (0, 1), 0), "recv", (8,))
    assert detect_deadlock(take_snapshots(r0=send, r1=recv)) is None
    short = mark_waiting(StatusPage(), Channel("recv", "pp", (0, 1), 0), "recv", (7,))
    assert detect_deadlock(take_snapshots(r0=send, r1=short)).kind == "mismatch"


def test_unequal_shares_of_an_all_to_all_match():
    pages = {f"r{r}": mark_waiting(StatusPage(), GRADS, "all_to_all", (r + 1, 2)) for r in range(3)}
    assert detect_deadlock(take_snapshots(**pages)) is None


def test_a_cycle_of_many_ranks_is_reported_in_few_lines():
    size = 40
    ranks = tuple(range(size))
    pages = {
        f"r{r}": mark_waiting(
            StatusPage(), Channel("recv", "ring", ranks, (r - 1) % size), "recv", where=f"ring.py:{r}"
        )
        for r in ranks
    }
    verdict = detect_deadlock(take_snapshots(**pages))
    assert verdict.ranks == ranks and len(verdict.text.splitlines()) < 15


def test_a_verdict_needs_two_equal_readings():
    stuck, detector = mark_waiting(StatusPage(), GRADS), DeadlockDetector()
    gone = mark_returned().take_snapshot()
    assert detector.update({0: stuck.take_snapshot(), 1: gone}, 0.0) is None
    stuck.on_resume()
    mark_waiting(stuck, GRADS)  # the same operation, but the status has changed
    assert detector.update({0: stuck.take_snapshot(), 1: gone}, 1.0) is None
    assert detector.update({0: stuck.take_snapshot(), 1: gone}, 2.0).ranks == (0,)


def test_a_rank_about_to_join_a_deadlock_is_waited_for():
    pages = {0: mark_waiting(StatusPage(), GRADS), 1: mark_returned(), 2: StatusPage()}
    pages[2].on_resume()
    detector = DeadlockDetector()

    def see(now_s):
        return detector.update({rank: page.take_snapshot() for rank, page in pages.items()}, now_s)

    assert [see(0.0), see(0.1), see(0.2)] == [None] * 3
    mark_waiting(pages[2], GRADS)
    assert see(0.3) is None  # it has just moved
    assert see(0.4).ranks == (0, 2)


def test_a_deadlock_is_reported_though_another_rank_works_on_and_on():
    pages = {0: mark_waiting(StatusPage(), GRADS), 1: mark_returned(), 2: StatusPage()}
    pages[2].on_resume()
    detector, seen = DeadlockDetector(), {rank: page.take_snapshot() for rank, page in pages.items()}
    assert [detector.update(seen, now_s) for now_s in (0.0, 0.5, 1.4)] == [None] * 3
    assert detector.update(seen, 1.6).ranks == (0,)


def test_rank_names_are_merged_into_runs():
    assert [format_ranks(ranks) for ranks in ([3], [2, 0, 1, 5], [0, 2])] == ["rank 3", "ranks 0-2, 5", "ranks 0, 2"]
