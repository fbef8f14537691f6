"""A pytest plugin that reports the CPU time of each test: the cost of the suite, whatever else the machine is doing.

`python -m pytest -p tests.helpers.cpu_seconds -n 3` ends with the CPU seconds of the most expensive test files and
tests. The time of all processes that a test starts counts, if they end before the test or are still its descendants.
"""

import os
from collections import Counter
from pathlib import Path

import pytest

SHOWN = 40
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    begin_s = tree_cpu_s(os.getpid())
    item.cpu_begin_s = begin_s
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    now_s = tree_cpu_s(os.getpid())
    report.cpu_s, item.cpu_begin_s = now_s - item.cpu_begin_s, now_s
    return report


def pytest_terminal_summary(terminalreporter):
    by_test: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "cpu_s"):
                by_test[report.nodeid] += report.cpu_s
    by_file: Counter[str] = Counter()
    for name, cpu_s in by_test.items():
        by_file[name.partition("::")[0]] += cpu_s
    terminalreporter.section(f"CPU seconds: {by_test.total():.0f} in {len(by_test)} tests")
    for counts in (by_file, by_test):
        for name, cpu_s in counts.most_common(SHOWN):
            terminalreporter.write_line(f"{cpu_s:7.1f}  {name}")


def tree_cpu_s(pid: int) -> float:
    """CPU seconds of a process, of its descendants that live, and of those that ended and were waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:  # it has ended meanwhile
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS_PER_SECOND + sum(map(tree_cpu_s, children))
