"""Processes of a test that really die, for exercises whose code must survive it."""

import faulthandler
import re
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exercises.rank_tests import finding_of
from exercises.testing import Answer, Finding, ProcessFailed, learner_file
from minidist.tools.launch.elastic import ElasticRanks, Rendezvous

_MAX_GROUPS = 40
_QUIET_S = 12.0  # without a rendezvous or an end; less than a check waits for a rank that is asleep


def run_processes(
    answer: Answer,
    function: Callable[[int, Rendezvous], Any],
    size: int,
    on_group: Callable[[ElasticRanks], None] | None = None,
) -> ElasticRanks:
    """Run `function(number, rendezvous)` in processes, as ElasticRanks does, until all have ended or died.

    on_group: called with the processes when a group has been formed; may start more. Raises ProcessFailed for the first
    finding of a process, and if the processes do not end: then the finding says what each one waits for.
    """
    file = learner_file(answer)

    def run(number: int, rendezvous: Rendezvous) -> Any:
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))  # the threads of several groups exceed that of a check
        with open(_stack_file(folder, number), "w") as stack:

            def timed_rendezvous(group):
                faulthandler.dump_traceback_later(_QUIET_S / 2, file=stack)
                return rendezvous(group)

            try:
                return function(number, timed_rendezvous)
            except BaseException as error:
                finding = finding_of(error, file)
                finding.rank, finding.size = number, max(size, number + 1, 2)
                return finding
            finally:
                faulthandler.cancel_dump_traceback_later()

    def formed(members: list[int]) -> None:
        answer._note(f"group {len(processes.groups)}: processes {', '.join(map(str, members))}")  # this is progress
        if len(processes.groups) > _MAX_GROUPS:
            raise ProcessFailed(Finding("hang", "your code calls rendezvous again and again", size=max(size, 2)))
        if on_group:
            on_group(processes)

    with tempfile.TemporaryDirectory() as folder, ElasticRanks(run, size, formed) as processes:
        try:
            for _, value in processes.serve(_QUIET_S):
                if isinstance(value, Finding):
                    raise ProcessFailed(value)
        except TimeoutError:
            raise ProcessFailed(_hang_finding(processes, folder, file, size)) from None
    return processes


def _stack_file(folder: str, number: int) -> Path:
    """Return the file to which process `number` writes its stack."""
    return Path(folder, f"stack-{number}")


def _hang_finding(processes: ElasticRanks, folder: str, file: str, size: int) -> Finding:
    """Report what each living process waits for; the line is that of the first that is not in the rendezvous."""
    lines, found = ["your code does not finish"], None
    for number in processes.pids:
        stack = _stack_file(folder, number).read_text()
        line = next((int(m[1]) for m in re.finditer(rf'File "{re.escape(file)}", line (\d+)', stack)), None)
        met = number in processes.processes_in_rendezvous
        lines.append(f"  process {number} " + ("waits in the rendezvous" if met else f"is at line {line} of your file"))
        found = line if found is None and not met else found
    lines += [f"  process {number} has died" for number in processes.dead]
    source = Path(file).read_text().splitlines()[found - 1].strip()[:100] if found else ""
    return Finding("hang", "\n".join(lines), line=found, source=source, size=max(size, 2))
