"""A pytest plugin: with `--rerun-flaky`, run a test that a busy machine may have failed once more, alone.

A test that starts processes can fail because the machine is busy: a deadline passes, a connection breaks, a worker
crashes. After all workers have ended, each such test runs once more in a process of its own. If it passes, the suite
prints `flaky: NAME` with both reports and stays green; more than `MAX_FLAKY` such tests make it red.

A failure of values is never run again: an AssertionError, in the test or on one of its ranks, stands. The exception is
a test with the marker `process_lifecycle`, whose assertions are about when and how processes end and what they print.
"""

import subprocess
import sys

import pytest

MAX_FLAKY = 3
DEADLINE_S = 900.0


def pytest_addoption(parser):
    parser.addoption(
        "--rerun-flaky", action="store_true", help="run a failed test once more, alone, if it may be flaky"
    )


def pytest_configure(config):
    if config.getoption("rerun_flaky") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_FlakyTests(config), "flaky-tests")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        report.is_value_failure = is_value_failure(call.excinfo.value, item)
    return report


def is_value_failure(error: BaseException, item) -> bool:
    """Whether a test failed because a value was wrong, and not because of when or how a process ended."""
    if item.get_closest_marker("process_lifecycle"):
        return False
    of_ranks = getattr(error, "tracebacks", {}).values()  # of a RankFailure: what the ranks raised, as text
    return isinstance(error, AssertionError) or any("AssertionError" in text for text in of_ranks)


class _FlakyTests:
    """Collects the failures of all workers, and runs those that may be flaky again before the summary is printed."""

    def __init__(self, config):
        self.config = config
        self.failed: dict[str, list] = {}

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.setdefault(report.nodeid, []).append(report)

    @pytest.hookimpl(trylast=True)  # after pytest-xdist has ended its workers
    def pytest_sessionfinish(self, session):
        # A report without the attribute is pytest-xdist's, of a worker that crashed.
        candidates = {
            name: reports
            for name, reports in self.failed.items()
            if not any(getattr(report, "is_value_failure", False) for report in reports)
        }
        if len(candidates) > MAX_FLAKY or session.shouldstop:
            return
        terminal = self.config.pluginmanager.getplugin("terminalreporter")
        for name, reports in candidates.items():
            second = _run_alone(name, self.config.rootpath)
            terminal.ensure_newline()
            if second.returncode:
                terminal.write_line(f"failed again, alone: {name}\n{second.stdout}")
                continue
            terminal.write_line(f"flaky: {name}", yellow=True)
            for report in reports:
                terminal.write_line(f"the first run failed:\n{report.longreprtext}")
                terminal.stats[("error" if report.when in ("setup", "teardown") else "failed")].remove(report)
            terminal.write_line(f"the second, alone, passed:\n{second.stdout}")
            terminal.stats.setdefault("flaky", []).append(reports[0])
        # A file that cannot be imported is an error, too, which pytest-xdist reports as if a test had failed.
        is_green = not terminal.stats.get("failed") and not terminal.stats.get("error")
        if session.exitstatus == pytest.ExitCode.TESTS_FAILED and is_green:
            session.exitstatus = pytest.ExitCode.OK


def _run_alone(name: str, root) -> subprocess.CompletedProcess:
    """Run one test in a process of its own, with nothing else of the suite running."""
    command = [sys.executable, "-m", "pytest", "-n0", "-m", "", name]
    try:
        return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired as error:
        return subprocess.CompletedProcess(command, 1, f"not done after {DEADLINE_S:g} s\n{error.stdout}")
