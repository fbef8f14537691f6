"""Graceful stops: a signal requests the stop, and the run ends after the current step."""

import os
import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask a run to stop: SIGINT, SIGTERM, and SIGHUP unless this process ignores it.

    A terminal that closes sends SIGHUP; the command nohup starts a program that ignores it.
    """
    return [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


class StopSignalRecorder:
    """A context manager that records the signals of `stop_signals` as a request to stop: they do not end the process.

    signal_name: the first signal received in this context, as "SIGINT"; None if there was none.
    A rank must not exit alone: the others would wait for it in their next collective. Before each update the trainer
    finds out whether any rank has recorded a signal, and all ranks save and exit after the same step. A second Ctrl-C
    raises KeyboardInterrupt at once.

    Raises RuntimeError if entered outside the main thread, as Python delivers signals to the main thread only.
    """

    def __init__(self):
        self.signal_name: str | None = None
        self._interrupts = 0
        self._before: dict[int, object] = {}
        self._wakeup: tuple[int, int, threading.Thread] | None = None

    def __enter__(self) -> "StopSignalRecorder":
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("StopSignalRecorder works in the main thread only: Python delivers signals to no other")
        self.signal_name = None
        self._interrupts = 0
        for number in stop_signals():
            self._before[number] = signal.signal(number, self._record)
        # Python does not call the handler while the main thread is inside torch; the wakeup pipe is written at once.
        read, write = os.pipe()
        os.set_blocking(write, False)
        listener = threading.Thread(target=self._listen, args=(read,), daemon=True)
        self._wakeup = write, signal.set_wakeup_fd(write, warn_on_full_buffer=False), listener
        listener.start()
        return self

    def __exit__(self, *error: object) -> None:
        write, before, listener = self._wakeup
        signal.set_wakeup_fd(before)
        os.close(write)
        listener.join()  # or it could report a signal of this context to the next one
        for number, handler in self._before.items():
            # None: the old handler was not installed from Python, and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _listen(self, read: int) -> None:
        """Set `signal_name` when a signal arrives, until the pipe's write end is closed."""
        with open(read, "rb", buffering=0) as pipe:
            while number := pipe.read(1):
                if number[0] in SIGNALS:
                    self.signal_name = self.signal_name or signal.Signals(number[0]).name

    def _record(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: note the signal; on a second SIGINT raise KeyboardInterrupt."""
        self.signal_name = self.signal_name or signal.Signals(number).name
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
