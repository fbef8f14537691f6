"""The shared-memory page with a rank's status, without processes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.comm.status import Channel
from minidist.tools.deadlock.detector import detect_deadlock
from minidist.tools.deadlock.status_page import PAGE_BYTES, StatusPage
from tests.helpers.status_pages import GRADS, mark_waiting

# The page


def test_another_reader_of_the_memory_sees_the_wait():
    memory = bytearray(PAGE_BYTES)
    mark_waiting(StatusPage(memory), GRADS, shape=(2, 3), where="/home/me/train.py:31")
    seen = StatusPage.read_snapshot(memory)
    assert (seen.state, seen.wait_channel, seen.wait_seq) == ("waiting", GRADS, 1)
    assert (seen.wait_operation, seen.wait_location) == ("all_reduce (2, 3) float32", "/home/me/train.py:31")
    assert seen.progress_by_channel[GRADS].num_launched == 1


def test_sequence_numbers_count_per_channel():
    page, other = StatusPage(), Channel("send", "grads", (0, 1, 2), 1, 5)
    assert [page.on_launch(c, "x", (), "int64") for c in (GRADS, GRADS, other, GRADS)] == [1, 2, 1, 3]


def test_every_write_changes_the_snapshot():
    page = StatusPage()
    seen = [page.take_snapshot()]
    for _ in range(2):
        mark_waiting(page, GRADS)
        seen.append(page.take_snapshot())
        page.on_resume()
        seen.append(page.take_snapshot())
    assert len({snapshot.version for snapshot in seen}) == len(seen)


def test_a_page_being_written_is_not_read():
    memory = bytearray(PAGE_BYTES)
    mark_waiting(StatusPage(memory), GRADS)
    memory[0] += 1  # the version while writing is odd
    assert StatusPage.read_snapshot(memory) is None


def test_the_image_reads_like_the_page():
    page = mark_waiting(StatusPage(), GRADS)
    assert StatusPage.read_snapshot(page.to_bytes()) == page.take_snapshot()
    assert len(page.to_bytes()) < 1024


def test_a_long_path_keeps_its_line():
    page = mark_waiting(StatusPage(), GRADS, where="/a" * 300 + "/train.py:123")
    assert page.take_snapshot().wait_location.endswith("/train.py:123")


def test_more_channels_than_the_page_holds_still_count():
    page = StatusPage()
    channels = [Channel("send", "many", (0, 1), 1, tag) for tag in range(500)]
    assert [page.on_launch(c, "send", (1,), "int8") for c in channels + channels] == [1] * 500 + [2] * 500
    seen = mark_waiting(page, channels[-1], "send").take_snapshot()
    assert seen.wait_channel is None and detect_deadlock({0: seen}) is None


@given(
    st.sampled_from(["collective", "send", "recv"]),
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20),
    st.lists(st.integers(0, 5000), min_size=1, max_size=8, unique=True),
    st.none() | st.integers(0, 5000),
    st.integers(-1, 1 << 30),
)
def test_a_channel_reads_back_as_it_was_written(kind, group_name, ranks, peer, tag):
    channel = Channel(kind, group_name, tuple(ranks), peer, tag)
    assert mark_waiting(StatusPage(), channel).take_snapshot().wait_channel == channel


@pytest.mark.parametrize("ranks", [tuple(range(4096)), tuple(range(3, 4096, 8))])
def test_large_regular_groups_fit(ranks):
    channel = Channel("collective", "dp", ranks)
    assert mark_waiting(StatusPage(), channel).take_snapshot().wait_channel == channel


# The detection
