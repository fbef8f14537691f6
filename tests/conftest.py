"""Fixtures: one warm rank server for all tests with ranks, and a check that it leaves no process or shared memory."""

import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import hypothesis
import pytest

from minidist.tools.launch import RankServer, client
from tests.helpers import warm_python
from tests.helpers.processes import wait_until
from tests.helpers.small_run import descendants

# Torch's threads sleep while they wait for each other: on two busy cores, spinning takes more time than the work.
# OpenMP reads this once, when torch is imported; every process that a test starts inherits it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

pytest_plugins = ["tests.helpers.deadline", "tests.helpers.flaky"]

# nbformat validates with jsonschema, which imports this for a format that no notebook has: its grammar takes 1.5 s.
sys.modules.setdefault("rfc3987_syntax", None)

# A shell that starts a background job makes it ignore SIGINT, and so would every process that a test starts and wants
# to interrupt; `nohup` does so with SIGHUP. A handler is not inherited: these processes get the default action.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# The same examples in every run, and no clock: the machine may be busy.
hypothesis.settings.register_profile("minidist", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.load_profile("minidist")

DEADLINE_S = 240.0  # of one job; the deadline of a test is in tests/helpers/deadline.py
_CLEANUP_S = 10.0
# Modules that the ranks of most tests import: the server imports them once, before it forks the ranks.
PRELOAD = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.optim"),
    *("torch.distributed.checkpoint", "torch.distributed.tensor.parallel"),
    *("safetensors.torch", "matplotlib.figure", "matplotlib.image", "pytest", "hypothesis"),
    *("minidist.train.trainer", "minidist.tools.parity.ranks", "minidist.tools.notebook.rank_session"),
    *("exercises.network", "exercises.observations", "exercises.rank_tests", "tests.helpers.small_run"),
    *("exercises.side_effects", "exercises.conditions"),
    "exercises.shared_code",  # the last: it remembers the functions of the others
)
_SHM = Path("/dev/shm")

# The rank servers that tests start are forked from a warm process, too.
client.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": warm_python.warm_python.popen})


@pytest.fixture(scope="session")
def _nothing_is_left_behind():
    """Check after the last test with ranks that no child process and no new file in /dev/shm is left."""
    before = _shm_files()
    children_before = _child_pids()
    yield
    started = warm_python.warm_python.pid
    assert not started or wait_until(lambda: not descendants(started), _CLEANUP_S), "programs are still running"
    warm_python.close_all()
    wait_until(lambda: not (_child_pids() - children_before or _shm_files() - before), _CLEANUP_S)
    left = {pid: _command_line(pid) for pid in _child_pids() - children_before}
    assert not left, f"these child processes are still there: {left}"
    assert not _shm_files() - before, "these files are still in /dev/shm"


@pytest.fixture(scope="session")
def server(_nothing_is_left_behind):
    """A warm rank server: `server.run(function, ranks, args, deadline_s=...)`."""
    from exercises.catalogue import Catalogue
    from exercises.check import modules_to_preload

    # Those of PRELOAD last: the last of them remembers the functions of all others.
    with RankServer(preload=(*modules_to_preload(Catalogue().values())[:-1], *PRELOAD)) as server:
        yield server


@pytest.fixture
def ranks(server):
    """`ranks(function, n, *args)`: what `function(world, *args)` returned on each of n ranks."""

    def run(function, n, *args, **options):
        return server.run(function, n, args, **{"deadline_s": DEADLINE_S, **options}).values

    return run


@pytest.fixture
def check_answer(server, tmp_path):
    """`check_answer(exercise, text)`: the verdict on a learner's file with that text."""
    from exercises.check import check

    def run(exercise, text, **options):
        file = tmp_path / f"{exercise.name}.py"
        file.write_text(text)
        return check(exercise, file, server, **options)

    return run


def _shm_files() -> set[str]:
    return {file.name for file in _SHM.iterdir()} if _SHM.is_dir() else set()


def _child_pids() -> set[int]:
    """Process ids of this process's children; none where /proc does not list them."""
    pids = set()
    for task in Path("/proc/self/task").glob("*/children"):
        pids.update(map(int, task.read_text().split()))
    return pids


def _command_line(pid: int) -> str:
    """What the process was started with, and whether it has ended without being waited for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "ended meanwhile"
    return f"state {state}: {words}"
