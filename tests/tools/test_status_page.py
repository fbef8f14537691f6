"""The page of a rank's status: no process needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.comm.status import Channel
from minidist.tools.deadlock.detector import detect_deadlock
from minidist.tools.deadlock.status_page import PAGE_BYTES, StatusPage
from tests.helpers.status_pages import GRADS, waiting

# The page


def test_another_reader_of_the_memory_sees_the_wait():
    memory = bytearray(PAGE_BYTES)
    waiting(StatusPage(memory), GRADS, shape=(2, 3), where="/home/me/train.py:31")
    seen = StatusPage.read(memory)
    assert (seen.state, seen.channel, seen.seq) == ("waiting", GRADS, 1)
    assert (seen.operation, seen.where) == ("all_reduce (2, 3) float32", "/home/me/train.py:31")
    assert seen.progress[GRADS].launched == 1


def test_sequence_numbers_count_per_channel():
    page, other = StatusPage(), Channel("send", "grads", (0, 1, 2), 1, 5)
    assert [page.launch(c, "x", (), "int64") for c in (GRADS, GRADS, other, GRADS)] == [1, 2, 1, 3]


def test_every_write_changes_the_snapshot():
    page = StatusPage()
    seen = [page.snapshot()]
    for _ in range(2):
        waiting(page, GRADS)
        seen.append(page.snapshot())
        page.resume()
        seen.append(page.snapshot())
    assert len({snapshot.version for snapshot in seen}) == len(seen)


def test_a_page_being_written_is_not_read():
    memory = bytearray(PAGE_BYTES)
    waiting(StatusPage(memory), GRADS)
    memory[0] += 1  # the version while writing is odd
    assert StatusPage.read(memory) is None


def test_the_image_reads_like_the_page():
    page = waiting(StatusPage(), GRADS)
    assert StatusPage.read(page.image()) == page.snapshot()
    assert len(page.image()) < 1024


def test_a_long_path_keeps_its_line():
    page = waiting(StatusPage(), GRADS, where="/a" * 300 + "/train.py:123")
    assert page.snapshot().where.endswith("/train.py:123")


def test_more_channels_than_the_page_holds_still_count():
    page = StatusPage()
    channels = [Channel("send", "many", (0, 1), 1, tag) for tag in range(500)]
    assert [page.launch(c, "send", (1,), "int8") for c in channels + channels] == [1] * 500 + [2] * 500
    seen = waiting(page, channels[-1], "send").snapshot()
    assert seen.channel is None and detect_deadlock({0: seen}) is None


@given(
    st.sampled_from(["collective", "send", "recv"]),
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20),
    st.lists(st.integers(0, 5000), min_size=1, max_size=8, unique=True),
    st.none() | st.integers(0, 5000),
    st.integers(-1, 1 << 30),
)
def test_a_channel_reads_back_as_it_was_written(kind, use, ranks, peer, tag):
    channel = Channel(kind, use, tuple(ranks), peer, tag)
    assert waiting(StatusPage(), channel).snapshot().channel == channel


@pytest.mark.parametrize("ranks", [tuple(range(4096)), tuple(range(3, 4096, 8))])
def test_large_regular_groups_fit(ranks):
    channel = Channel("collective", "dp", ranks)
    assert waiting(StatusPage(), channel).snapshot().channel == channel


# The detection
