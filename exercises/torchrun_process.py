"""torchrun as a child process that has a deadline, and that no signal leaves behind.

`run_under_torchrun` returns when all ranks have ended well. In every other case, the deadline and Ctrl-C included, it
ends torchrun and all ranks before it raises.
"""

import contextlib
import faulthandler
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from exercises.catalogue import ROOT
from minidist.errors import RunError
from minidist.tools.launch.rank_handle import find_innermost_line

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_GRACE_S = 3.0  # after the deadline, in which every rank writes where it is
_AGENT_S = 40.0  # in which torchrun ends its ranks, where this process cannot find them
_OWN_LINE = re.compile(r"^(?:[EWI]\d{4} |\*{20}|Setting OMP_NUM_THREADS|Traceback )")  # of torchrun, not of a rank
_MAX_LINES = 12


@contextlib.contextmanager
def hold_signals() -> Iterator[None]:
    """Return a context manager that holds SIGINT, SIGTERM and SIGHUP back until its exit, and delivers them there.

    Python drops an exception that a signal's handler raises while `subprocess` forks: the signal would be lost.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    held = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in held:
        signal.signal(number, lambda number, _frame: received.append(number))
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        for number in received:
            signal.raise_signal(number)


def run_under_torchrun(module: str, argument: str, ranks: int, folder: Path, deadline_s: float) -> None:
    """Run `python -m module argument` on `ranks` ranks under torchrun; the ranks write to this process's stdout.

    folder: for notes of torchrun and of the ranks; it exists and is empty. The program calls `dump_stack_at_deadline`,
    and may call `note_step`. Raises RunError if a rank fails, or if the ranks have not ended after `deadline_s` s.
    """
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", module, argument]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    errors, process = folder / "stderr", None
    try:
        with errors.open("w") as stream, hold_signals():
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                env=environ,
                stdin=subprocess.DEVNULL,
                stderr=stream,
                start_new_session=True,  # Ctrl-C reaches only this process, which ends the others
            )
        code = process.wait(deadline_s + _GRACE_S)
    except subprocess.TimeoutExpired:
        places = "\n".join(f"rank {rank}: {_describe_place(folder, rank)}" for rank in range(ranks))
        raise RunError(f"the run under torchrun had not ended after {deadline_s:g} s:\n{places}") from None
    finally:
        if process is not None:
            _end_with_descendants(process)
    if code:
        raise RunError(_describe_failure(errors.read_text(errors="replace"), code))


def dump_stack_at_deadline(folder: Path, rank: int, end_s: float) -> None:
    """Let this rank write its stack to `folder` if it still runs at `end_s`, in Unix time."""
    stream = (folder / f"stack-{rank}").open("w")  # open until the process ends
    faulthandler.dump_traceback_later(max(0.1, end_s - time.time()), file=stream)


def note_step(folder: Path, rank: int, step: int) -> None:
    """Write to `folder` that this rank has completed `step` steps."""
    (folder / f"step-{rank}").write_text(str(step))


def _describe_place(folder: Path, rank: int) -> str:
    """Return the number of steps that a rank has completed, and the line at which it was."""
    steps, stack = folder / f"step-{rank}", folder / f"stack-{rank}"
    if not stack.exists():
        return "had not started"
    done = f"{steps.read_text()} steps done" if steps.exists() else "before the first step"
    threads = re.split(r"(?m)^(?=Thread |Current thread )", stack.read_text())
    main = next((thread for thread in threads if "certificate_run.py" in thread), threads[-1])
    return f"{done}, at {find_innermost_line(main) or 'an unknown line'}"


def _describe_failure(errors: str, code: int) -> str:
    """Return the messages of the ranks in what torchrun and they have written to stderr."""
    lines = errors.splitlines()
    first = next((index for index, line in enumerate(lines) if line.startswith("certificate: ")), 0)
    messages = []
    for line in lines[first:]:
        if messages and _OWN_LINE.match(line):
            break
        messages.append(line)
    text = "\n".join(messages[:_MAX_LINES]).removeprefix("certificate: ").strip()
    return f"the run under torchrun failed: {text or f'it ended with code {code}'}"


def _end_with_descendants(process: subprocess.Popen) -> None:
    """End a process that may still run, and all processes that it has started; wait until it has ended."""
    with hold_signals():
        if process.poll() is not None:
            return
        if not Path("/proc/self/stat").exists():
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_AGENT_S)
        else:
            _kill(process.pid, signal.SIGSTOP)  # from now on it starts no other
            for pid in _list_descendants(process.pid):
                _kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()


def _kill(pid: int, number: int) -> None:
    """Send a signal to a process, if it still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _list_descendants(pid: int) -> Sequence[int]:
    """Return the ids of all processes that a process, its children and theirs have started."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    found, level = [], {pid}
    while level:
        level = {child for child, parent in parents.items() if parent in level}
        found += sorted(level)
    return found
