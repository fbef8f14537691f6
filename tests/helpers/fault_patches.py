"""Read the fault patches of tests/faults, and run programs on a patched copy of the package.

A copy must be imported by a process that has not imported minidist, and torch takes seconds to import. So one clean
process per test session imports torch, and forks for every copy; the rank servers that the copy starts are forked too.
"""

import contextlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
PACKAGE = _TESTS.parent / "minidist"
FAULTS = _TESTS / "faults"


@dataclass(frozen=True)
class Edit:
    """Replace the only occurrence of `find` in a file of the package."""

    file: str
    find: str
    replace: str


@dataclass(frozen=True)
class Fault:
    """A patch that makes the package wrong, and the check that must notice.

    source: where the fault was seen. only: names of parity rows (any of `--full`) on `ranks` ranks that must fail.
    expect: a regular expression for the first wrong value of these rows, or for the reason why they could not run.
    detector: for a fault that parity cannot see, the test that must fail.
    """

    name: str
    title: str
    source: str
    edit: tuple[Edit, ...]
    only: tuple[str, ...] = ()
    expect: str | None = None
    detector: str | None = None
    ranks: int = 2

    def __post_init__(self):
        parity, test = [bool(self.only), self.expect is not None], [self.detector is not None] * 2
        if not self.edit or parity == test or parity[0] != parity[1]:
            raise ValueError(f"{self.name} needs edits, and either `only` and `expect` or `detector`")


def read_fault(file: Path) -> Fault:
    """The fault in a TOML file. Raises TypeError for a key that a fault does not have."""
    values = tomllib.loads(file.read_text())
    lists = {"edit": tuple(Edit(**edit) for edit in values["edit"]), "only": tuple(values.get("only", ()))}
    return Fault(file.stem, **{**values, **lists})


def read_faults() -> list[Fault]:
    return [read_fault(file) for file in sorted(FAULTS.glob("*.toml"))]


def copy_package(folder: Path, edits: Sequence[Edit] = ()) -> Path:
    """Copy the package into `folder` and edit it. Raises ValueError for an edit that does not apply exactly once."""
    shutil.copytree(PACKAGE, folder / "minidist")
    for edit in edits:
        file = folder / "minidist" / edit.file
        text = file.read_text()
        if (count := text.count(edit.find)) != 1:
            raise ValueError(f"{edit.file} has this text {count} times, not once:\n{edit.find}")
        file.write_text(text.replace(edit.find, edit.replace))
    return folder


class ForkServer:
    """Runs `python -m MODULE ARGUMENTS` on a copy of the package in a process that has already imported torch."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            # A process that forks must have no threads.
            env={
                **os.environ,
                "OPENBLAS_NUM_THREADS": "1",
                "OMP_NUM_THREADS": "1",
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            },
            start_new_session=True,
        )
        theirs.close()
        self._stream = ours.makefile("rw")
        ours.close()

    def run(self, folder: Path, module: str, arguments: Sequence[str], deadline_s: float) -> tuple[int | None, str]:
        """Exit code (None when the deadline passed) and output."""
        log = folder / "output.txt"
        request = {"folder": str(folder), "argv": [module, *arguments], "log": str(log), "deadline_s": deadline_s}
        print(json.dumps(request), file=self._stream, flush=True)
        code = json.loads(self._stream.readline())
        return code, log.read_text()

    def close(self) -> None:
        self._stream.close()
        self._process.wait(10)


class ForkedInterpreter:
    """Stands in for `subprocess.Popen([python, "-P", "-c", code], ...)`: a fork of this process executes the code."""

    def __init__(self, command: Sequence[str], *, env, stdin, pass_fds: Sequence[int], start_new_session: bool):
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        with _exits_with_code():
            os.setsid()
            keep = {0, 1, 2, *pass_fds}
            for fd in map(int, os.listdir("/proc/self/fd")):
                if fd not in keep:
                    with contextlib.suppress(OSError):
                        os.close(fd)
            os.environ.clear()
            os.environ.update(env)
            exec(compile(command[-1], "<string>", "exec"), {"__name__": "__main__"})

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout_s: float | None = None) -> int:
        if self._code is None:
            self._code = _wait(self.pid, timeout_s)
        if self._code is None:
            raise subprocess.TimeoutExpired("forked interpreter", timeout_s)
        return self._code

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def _wait(pid: int, timeout_s: float | None) -> int | None:
    """Exit code of a child; None when it has not ended in time."""
    handle = os.pidfd_open(pid)
    try:
        if not select.select([handle], [], [], timeout_s)[0]:
            return None
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(handle)


@contextlib.contextmanager
def _exits_with_code():
    """End this process with the body, whatever it does: no frame above it belongs to the child of a fork."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _serve(stream) -> None:
    # What the package and its tests import, but never the package itself.
    import hypothesis  # noqa: F401
    import matplotlib.figure
    import matplotlib.image  # noqa: F401
    import pytest  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch._dynamo
    import torch.distributed  # noqa: F401

    assert not any(name.partition(".")[0] == "minidist" for name in sys.modules)
    for line in stream:
        request = json.loads(line)
        pid = os.fork()
        if not pid:
            with _exits_with_code():
                _run_request(request)
        code = _wait(pid, request["deadline_s"])
        if code is None:
            os.killpg(pid, signal.SIGKILL)  # rank servers and ranks end with their client
            os.waitpid(pid, 0)
        print(json.dumps(code), file=stream, flush=True)


def _run_request(request: dict) -> None:
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for fd in (1, 2):
        os.dup2(log, fd)
    sys.path[0] = request["folder"]
    sys.path.append(str(_TESTS.parent))  # last, so that the copy's package comes before this one; for tests.helpers
    sys.argv = list(request["argv"])
    subprocess.Popen = ForkedInterpreter
    try:
        runpy.run_module(request["argv"][0], run_name="__main__", alter_sys=True)
    finally:
        used = sys.modules["minidist"].__file__
        assert used.startswith(request["folder"]), f"{used} was imported, not the copy in {request['folder']}"


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        _serve(connection.makefile("rw"))
