"""A pytest plugin: every test has a deadline that ends it, reports where it stood, and lets the suite go on.

When a test passes its deadline, an alarm signal raises `DeadlineExceeded` in the main thread. Its message holds the
stack of every thread and the state of every rank. A main thread that is blocked in C code runs no signal handler:
then, after another `HARD_EXTRA_S`, the process prints its stacks and exits, pytest-xdist reports the test as failed,
and a new worker takes the remaining tests.

The deadlines are for tests that hang. They are an order of magnitude above the time that a test takes on an idle
machine, so that a busy one does not change the verdict.
"""

import contextlib
import faulthandler
import gc
import os
import re
import signal
import sys
import threading
import traceback

import pytest

DEFAULT_S = 600.0
EXHAUSTIVE_S = 1800.0
HARD_EXTRA_S = 60.0
_OF_PYTEST = re.compile(r"/(_pytest|pluggy|xdist|execnet)/|^<")
_stderr: int | None = None
_armed = False


class DeadlineExceeded(BaseException):
    """The test passed its deadline. Not an Exception, so that neither the test nor Hypothesis handles it."""


def pytest_configure(config):
    global _stderr
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        _stderr = os.dup(2)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
    with _deadline(item, "setup"):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item):
    with _deadline(item, "test"):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    with _deadline(item, "teardown"):
        return (yield)


def deadline_of(item) -> float:
    """The deadline in seconds of each phase of a test: its marker's, else the default."""
    if marker := item.get_closest_marker("deadline"):
        return float(marker.args[0])
    return EXHAUSTIVE_S if item.get_closest_marker("exhaustive") else DEFAULT_S


@contextlib.contextmanager
def _deadline(item, phase: str):
    global _armed
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    deadline_s = deadline_of(item)

    def expire(_number, frame):
        global _armed
        if not _armed:
            return
        _armed = False
        raise DeadlineExceeded(f"the {phase} was not done after {deadline_s:g} s\n{_where(frame)}")

    before = signal.signal(signal.SIGALRM, expire)
    faulthandler.dump_traceback_later(deadline_s + HARD_EXTRA_S, exit=True, file=_stderr)
    _armed = True
    signal.setitimer(signal.ITIMER_REAL, deadline_s)
    try:
        yield
    except DeadlineExceeded:
        _replace_rank_servers()
        raise
    finally:
        _armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def _where(frame) -> str:
    """The stack of every thread, and where each rank of every running job stands."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {**sys._current_frames(), threading.get_ident(): frame}
    lines = []
    for ident, top in stacks.items():
        calls = [call for call in traceback.extract_stack(top) if not _OF_PYTEST.search(call.filename)]
        lines += [f"thread {names.get(ident, ident)}, innermost call last:", *traceback.format_list(calls)]
    for job in [job for server in _rank_servers() for job in list(server._jobs.values())]:
        try:
            from minidist.tools.launch.failure_report import report_missed_deadline

            report = str(report_missed_deadline(0.0, job.status_snapshots(), job.dump_stacks()))
            lines += [f"a job of {job.size} ranks:", *report.splitlines()[1:]]
        except Exception as error:  # the report of the deadline is worth more than that of one job
            lines.append(f"where the ranks of a job stand cannot be read: {error!r}")
    return "\n".join(lines)


def _rank_servers() -> list:
    client = sys.modules.get("minidist.tools.launch.client")
    return [each for each in gc.get_objects() if client and isinstance(each, client.RankServer)]


def _replace_rank_servers() -> None:
    """End every rank server: the alarm may have cut off a message of it. The next job of each starts a new one."""
    for server in _rank_servers():
        if server._process.poll() is None:
            server._process.kill()
            server._process.wait()
