"""A pytest plugin that reports the CPU time of tests: the cost of the suite, whatever else the machine is doing.

With `-p tests.helpers.cpu_seconds`, as in `make test`, a run ends with the CPU seconds of the most expensive test files
and tests. The time of all processes that a test starts counts, if they are waited for or still run when it ends.
"""

import os
from collections import Counter
from pathlib import Path

import pytest

SHOWN = 30
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_total_s = 0.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    global _total_s
    report = yield
    if report.when == "teardown":
        # A process that ended and has not been waited for yet is in no sum: the total must not fall and rise again.
        before_s, _total_s = _total_s, max(_total_s, cpu_seconds_of_tree(os.getpid()))
        report.cpu_s = _total_s - before_s
    return report


def pytest_terminal_summary(terminalreporter):
    by_test: Counter[str] = Counter()
    by_file: Counter[str] = Counter()
    for report in [report for reports in terminalreporter.stats.values() for report in reports]:
        if hasattr(report, "cpu_s"):
            by_test[report.nodeid] += report.cpu_s
            by_file[report.nodeid.partition("::")[0]] += report.cpu_s
    terminalreporter.section(f"CPU seconds: {by_test.total():.0f} in {len(by_test)} tests")
    for counts in (by_file, by_test):
        for name, cpu_s in counts.most_common(SHOWN):
            terminalreporter.write_line(f"{cpu_s:7.1f}  {name}")


def cpu_seconds_of_tree(pid: int) -> float:
    """CPU seconds of a process, of its descendants that live, and of those that ended and were waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:  # it has ended meanwhile, or there is no /proc
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS_PER_SECOND + sum(map(cpu_seconds_of_tree, children))
