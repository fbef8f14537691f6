"""Signals request a stop; a second Ctrl-C interrupts at once."""

import ctypes
import os
import signal
import threading

import pytest

from minidist.fault.signals import StopSignalRecorder

pytestmark = pytest.mark.process_lifecycle


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_is_recorded_and_nothing_is_interrupted(name):
    with StopSignalRecorder() as stop:
        assert stop.signal_name is None
        os.kill(os.getpid(), getattr(signal, name))
        assert stop.signal_name == name


def test_a_hangup_that_was_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    try:
        with StopSignalRecorder() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.signal_name is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_interrupt_raises_at_once():
    with StopSignalRecorder() as stop:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.signal_name == "SIGINT"


def test_a_second_termination_is_the_same_request():
    with StopSignalRecorder() as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        assert stop.signal_name == "SIGTERM"


@pytest.mark.parametrize("error", [None, ValueError])
def test_signal_handlers_are_restored_however_the_context_ends(error):
    seen, before = [], signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        if error is None:
            with StopSignalRecorder():
                pass
        else:
            with pytest.raises(error), StopSignalRecorder():
                raise error
        signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM] and signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_context_entered_again_starts_without_a_request():
    stop = StopSignalRecorder()
    with stop:
        signal.raise_signal(signal.SIGINT)
    with stop:
        assert stop.signal_name is None
        signal.raise_signal(signal.SIGINT)
        assert stop.signal_name == "SIGINT"


def test_only_the_main_thread_may_handle_signals():
    errors = []

    def enter():
        try:
            with StopSignalRecorder():
                pass
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert len(errors) == 1 and "main thread" in errors[0]


def test_a_signal_is_recorded_while_the_main_thread_is_inside_a_call():
    """Python runs the handler only when a call into C has returned, which in torch can take seconds."""
    recorded, call_returned = [], threading.Event()

    def interrupt():
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        while stop.signal_name is None and not call_returned.is_set():
            os.sched_yield()
        recorded.append((stop.signal_name, call_returned.is_set()))

    with StopSignalRecorder() as stop:
        thread = threading.Thread(target=interrupt)
        thread.start()
        ctypes.CDLL(None).sleep(4)
        call_returned.set()
        thread.join()
    assert recorded == [("SIGTERM", False)]
