"""The package's functions that write checkpoints, for an answer that calls them: an answer itself may write no files.

A file is the answer's if a line of the answer is on the call stack; a thread has a call stack of its own.
"""

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minidist.simple import checkpoint

_WRITERS = ("save", "prune", "remove_folder")


class CheckpointCalls:
    """Notes each call of the functions that write checkpoints, and runs it in a thread. Make it before an answer loads.

    calls: (name, folder) of all calls by another module than `checkpoint`. failing: names of those that raise OSError.
    skipped: names of those that do nothing.
    """

    def __init__(self):
        self.calls: list[tuple[str, Path]] = []
        self.failing: set[str] = set()
        self.skipped: set[str] = set()
        self._is_inside = False
        for name in _WRITERS:
            setattr(checkpoint, name, self._noted(name, getattr(checkpoint, name)))

    def _noted(self, name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:  # of another one, in its thread
                return function(*args, **kwargs)
            if name in self.failing:
                raise OSError(f"{name} fails in this test")
            self._is_inside = True
            try:
                call = functools.partial(function, *args, **kwargs)
                result = None if name in self.skipped else _run_in_thread(call)
            finally:
                self._is_inside = False
            self.calls.append((name, result if name == "save" else args[0]))
            return result

        del noted.__wrapped__  # would lead around it
        return noted


def _run_in_thread(function: Callable[[], Any]) -> Any:
    """Return the result of a function that a thread of its own has called; raise what it raised."""
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    [(result, error)] = outcome
    if error is not None:
        raise error
    return result
