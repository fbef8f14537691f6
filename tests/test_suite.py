"""The suite itself: a hanging test fails and later tests still run, SIGINT works, test modules are independent."""

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


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> str:
    """The output of a test suite in which one test hangs in Python code and one in C code."""
    file = tmp_path_factory.mktemp("hangs") / "test_hangs.py"
    file.write_text(HANGING_SUITE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.helpers.deadline",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:nbval",
        "-n1",
        file.name,
    ]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=file.parent, env=environ, capture_output=True, text=True, timeout=400)
    assert result.returncode == 1
    return result.stdout + result.stderr


def test_a_test_that_hangs_fails_and_the_others_pass(ran):
    assert "2 failed, 3 passed" in ran, ran
    assert "DeadlineExceeded: the test was not done after 10 s" in ran


def test_the_deadline_report_names_every_thread_and_rank(ran):
    report = ran.partition("DeadlineExceeded: the test was not done after 10 s")[2]
    assert "thread MainThread" in report and "thread helper" in report and "in wait_in_a_thread" in report
    assert "rank 0: running" in report and "in wait_for_ever" in report and "rank 1: returned" in report


def test_a_test_blocked_in_c_code_ends_its_own_worker_only(ran):
    line = HANGING_SUITE[: HANGING_SUITE.index("sum(range")].count("\n") + 1
    assert "Timeout (0:00:01.5" in ran and f'test_hangs.py", line {line} in test_c' in ran, ran
    assert "crashed while running 'test_hangs.py::test_c'" in ran


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
