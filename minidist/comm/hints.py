"""Hints for backends written in Python."""

import contextlib
import threading
from collections.abc import Iterator


class _Hints(threading.local):
    """expect_immediate_wait: whether this thread will wait for the operation that it launches right after the launch.

    A backend then need not wake a worker thread: the thread that waits can run the operation itself.
    """

    expect_immediate_wait = False


HINTS = _Hints()


@contextlib.contextmanager
def expect_immediate_wait() -> Iterator[None]:
    """Tell the backend that, within this context, this thread waits for each operation right after the launch.

    The backend may then run the operation in the waiting thread instead of a worker thread.
    """
    HINTS.expect_immediate_wait = True
    try:
        yield
    finally:
        HINTS.expect_immediate_wait = False
