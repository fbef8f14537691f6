"""The suite itself: a hanging test fails and later tests still run, flaky tests run again, SIGINT works, modules are
independent."""

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HANGING_SUITE = """
import threading
import time

import pytest

from minidist.tools.launch import RankServer
from tests.helpers import deadline

deadline.HARD_EXTRA_S = 1.0


@pytest.fixture(scope="module")
def server():
    with RankServer(preload=()) as server:
        yield server


def wait_for_ever(world):
    if world.rank == 0:
        while True:
            time.sleep(0.01)


def add_one(world, number):
    return number + 1


def wait_in_a_thread(stop):
    stop.wait()


def test_first(server):
    assert server.run(add_one, 1, (0,)).values == [1]  # the deadline of the next test is not for importing torch


@pytest.mark.deadline(10)
def test_python(server):
    stop = threading.Event()
    thread = threading.Thread(target=wait_in_a_thread, args=(stop,), name="helper")
    thread.start()
    try:
        while True:
            try:
                server.run(wait_for_ever, 2)
            except Exception:
                pass
    finally:
        stop.set()
        thread.join()


def test_next(server):
    assert server.run(add_one, 1, (1,)).values == [2]


@pytest.mark.deadline(0.5)
def test_c():
    sum(range(10**15))


def test_last(server):
    assert server.run(add_one, 1, (2,)).values == [3]
"""


def run_suite(folder, text: str, *options: str) -> tuple[int, str]:
    """Run a suite of one file with these plugins of ours; return pytest's exit status and what it printed."""
    file = folder / "test_inner.py"
    file.write_text(text)
    command = [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", "-p", "no:nbval", "-n1", file.name]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=400)
    return result.returncode, result.stdout + result.stderr


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> str:
    """The output of a test suite in which one test hangs in Python code and one in C code."""
    status, output = run_suite(tmp_path_factory.mktemp("hangs"), HANGING_SUITE, "-p", "tests.helpers.deadline")
    assert status == 1
    return output


def test_a_test_that_hangs_fails_and_the_others_pass(ran):
    assert "2 failed, 3 passed" in ran, ran
    assert "DeadlineExceeded: the test was not done after 10 s" in ran


def test_the_deadline_report_names_every_thread_and_rank(ran):
    report = ran.partition("DeadlineExceeded: the test was not done after 10 s")[2]
    assert "thread MainThread" in report and "thread helper" in report and "in wait_in_a_thread" in report
    assert "rank 0: running" in report and "in wait_for_ever" in report and "rank 1: returned" in report


def test_a_test_blocked_in_c_code_ends_its_own_worker_only(ran):
    line = HANGING_SUITE[: HANGING_SUITE.index("sum(range")].count("\n") + 1
    assert "Timeout (0:00:01.5" in ran and f'test_inner.py", line {line} in test_c' in ran, ran
    assert "crashed while running 'test_inner.py::test_c'" in ran


FLAKY_SUITE = """
from pathlib import Path

import pytest

from minidist.tools.launch.failure import RankFailure


def is_first_run(name):
    file = Path(name)
    first = not file.exists()
    file.touch()
    return first


@pytest.mark.parametrize("number", range({timeouts}))
def test_timeout(number):
    if is_first_run(f"timeout{{number}}"):
        raise TimeoutError("the machine is busy")


@pytest.mark.skipif({values} < 1, reason="not in this suite")
def test_value():
    assert not is_first_run("value")


@pytest.mark.skipif({values} < 2, reason="not in this suite")
def test_value_on_a_rank():
    if is_first_run("rank"):
        failure = RankFailure("raised", [1], "rank 1 raised")
        failure.tracebacks[1] = "AssertionError: 1 is not 2"
        raise failure


@pytest.mark.process_lifecycle
def test_exit_status():
    assert not is_first_run("status")
"""


@pytest.mark.parametrize(
    "timeouts, values, exit_status, reports",
    [
        (2, 0, 0, ["flaky: test_inner.py::test_timeout[1]", "flaky: test_inner.py::test_exit_status", "3 flaky"]),
        (0, 2, 1, ["2 failed", "1 flaky"]),  # wrong values are not run again
        (3, 0, 1, ["4 failed"]),  # too many
    ],
)
def test_a_test_that_fails_once_is_flaky_unless_a_value_was_wrong(tmp_path, timeouts, values, exit_status, reports):
    text = FLAKY_SUITE.format(timeouts=timeouts, values=values)
    markers = "markers=process_lifecycle: asserts no values"
    status, output = run_suite(tmp_path, text, "-p", "tests.helpers.flaky", "--rerun-flaky", "-o", markers)
    assert status == exit_status, output
    for report in reports:
        assert report in output, output
    if exit_status == 0:
        assert "the first run failed:" in output and "TimeoutError: the machine is busy" in output
        assert "the second, alone, passed:" in output and "1 passed" in output


def test_a_file_that_cannot_be_imported_makes_the_suite_red(tmp_path):
    status, output = run_suite(tmp_path, "import no_such_module", "-p", "tests.helpers.flaky", "--rerun-flaky")
    assert status != 0 and "1 error" in output, output


def test_sigint_works_although_the_caller_ignores_it():
    code = "import signal; from tests import conftest; print(signal.getsignal(signal.SIGINT).__name__)"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}

    def ignore():
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, preexec_fn=ignore)
    assert result.stdout == "default_int_handler\n", result.stderr


def test_no_test_module_imports_another():
    """Shared code belongs in tests/helpers."""
    for file in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.rpartition(".")[2].startswith("test_")], file
