"""Hints for backends written in Python."""

import contextlib
import threading
from collections.abc import Iterator


class _Hints(threading.local):
    """wait_follows: whether this thread waits for the operation that it is launching as soon as it is launched.

    A backend then need not wake a worker thread: the thread that waits can run the operation itself.
    """

    wait_follows = False


HINTS = _Hints()


@contextlib.contextmanager
def wait_follows() -> Iterator[None]:
    """Within this context, this thread waits for each operation right after it has launched it."""
    HINTS.wait_follows = True
    try:
        yield
    finally:
        HINTS.wait_follows = False
