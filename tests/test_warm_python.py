"""A program that is forked from a warm process sees and does what a new process does."""

import os
import signal
import subprocess
import sys

import pytest

from tests.helpers.small_run import descendants
from tests.helpers.warm_python import warm_python

pytestmark = [
    pytest.mark.usefixtures("_nothing_is_left_behind"),
    pytest.mark.skipif(sys.platform != "linux", reason="programs are forked on Linux only"),
]

TELL_ALL = """
import json, os, signal, sys
print(__name__, sys.argv, os.getcwd(), sys.stdin.read(), sys.dont_write_bytecode, sys.stdout.write_through)
print([path for path in sys.path if path], sorted(os.environ.items()), sorted(map(int, os.listdir("/proc/self/fd"))))
print({number.name: str(signal.getsignal(number)) for number in signal.valid_signals() if number < signal.SIGRTMIN})
print(os.getsid(0) == os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, ()), [os.isatty(n) for n in (0, 1, 2)])
"""


def outcomes(command, **options):
    """The exit code and the output of a program, as a new process and as a fork."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    for popen in (subprocess.Popen, warm_python.popen):
        with popen([sys.executable, *command], **options) as process:
            output, errors = process.communicate(timeout=120)
        yield process.returncode, output, errors.splitlines()[-1:]


@pytest.mark.parametrize("kind", ["-c", "-m", "file", "-u -P -c"])
def test_a_fork_has_the_surroundings_of_a_new_process(tmp_path, kind):
    (tmp_path / "tell_all.py").write_text(TELL_ALL)
    names = {"-m": ["-m", "tell_all"], "file": ["tell_all.py"]}
    command = [*names.get(kind, [*kind.split(), TELL_ALL]), "one", "--two=3"]
    environ = {**os.environ, "MINE": "x", "PYTHONPATH": "a:b", "PYTHONDONTWRITEBYTECODE": "1"}
    (tmp_path / "input").write_text("to be")
    found = []
    for popen in (subprocess.Popen, warm_python.popen):
        with open(tmp_path / "input") as file:
            how = {"stdin": file, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            with popen([sys.executable, *command], cwd=tmp_path, env=environ, start_new_session=True, **how) as process:
                found.append((process.communicate(timeout=120)[0].splitlines(), process.wait()))
    assert found[0] == found[1] and "'one', '--two=3'" in found[0][0][0]


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(3)",
        "import sys; sys.exit('too bad')",
        "import sys; sys.exit()",
        "1 / 0",
        "raise KeyboardInterrupt",
        "import atexit; atexit.register(print, 'last'); print('first')",
        "import os; os._exit(5)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import threading; threading.Timer(0.01, print, ['from a thread']).start()",
    ],
)
def test_a_fork_ends_as_a_new_process_ends(code):
    new, forked = outcomes(["-c", code])
    assert new == forked


def test_a_fork_is_waited_for_and_killed():
    process = warm_python.popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert process.pid in descendants(warm_python.pid) and process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(60) == process.poll() == -signal.SIGKILL
    process.stdin.close()


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        new, forked = outcomes(["-c", "import signal; print(signal.getsignal(signal.SIGINT))"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert new == forked == (0, "1\n", [])


PLAIN = (sys.executable, "-c", "0")


@pytest.mark.parametrize(
    "command, environ", [((sys.executable, "-E", "-c", "0"), {}), (PLAIN, {"OMP_X": "1"}), (("true",), {})]
)
def test_what_a_fork_cannot_stand_in_for_is_a_new_process(command, environ):
    with warm_python.popen(command, env={**os.environ, **environ}) as process:
        assert process.wait(60) == 0 and process._report is None


def test_what_a_fork_starts_is_forked_too():
    ask = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys; print(\"torch\" in sys.modules)'])"
    )
    assert warm_python.run([sys.executable, "-c", ask], timeout=120).stdout == "True\n"
