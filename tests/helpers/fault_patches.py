"""Read the fault patches of tests/faults, and run programs on a patched copy of the package.

A copy must be imported by a process that has not imported minidist, and torch takes seconds to import: each program is
a fork of a process that has imported torch, and so are the rank servers that it starts.
"""

import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.warm_python import warm_libraries

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


# Runs a module, and makes sure that it has used the copy of the package in the folder.
_RUN_ON_COPY = """
import runpy, sys
sys.path[0], *sys.argv = sys.argv[1:]
folder = sys.path[0]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
finally:
    used = sys.modules["minidist"].__file__
    assert used.startswith(folder), f"{used} was imported, not the copy in {folder}"
"""


def run_on_copy(folder: Path, module: str, arguments: Sequence[str], deadline_s: float) -> tuple[int | None, str]:
    """Run `python -m module arguments` on the copy of the package in `folder`.

    Return the exit code, None when the deadline passed, and the output.
    """
    environ = {**os.environ, "PYTHONPATH": str(_TESTS.parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environ["OMP_NUM_THREADS"] = "1"
    log = folder / "output.txt"
    with open(log, "w") as file:
        process = warm_libraries.popen(
            [sys.executable, "-c", _RUN_ON_COPY, str(folder), module, *arguments],
            cwd=_TESTS.parent,
            env=environ,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait(deadline_s), log.read_text()
    except subprocess.TimeoutExpired:
        return None, log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # rank servers and ranks end with their client
            process.wait()
