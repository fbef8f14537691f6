"""The sandbox in which the code of others is graded: attempted escapes, and what is left after them.

The attempts stand in the text of a test, where no guard sees them: only the sandbox is tested.
"""

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from exercises import sandbox
from exercises.catalogue import ROOT, Catalogue
from exercises.check import check, compile_tests
from exercises.diagnosis import Run, run_and_diagnose
from exercises.rank_tests import Request
from exercises.sandbox import SandboxedRankServer
from exercises.scratch import create_scratch, open_scratch
from minidist.errors import UserError
from minidist.tools.launch.failure import RankError
from tests.helpers.processes import wait_until

_HANG_S = 20.0
_SECRET = "INSTRUCTOR_TOKEN"
_EXERCISE = "block_partition"


@pytest.fixture(scope="module", params=sandbox.KINDS)
def jail(request):
    """A sandboxed rank server of each kind."""
    if reason := sandbox.why_not(request.param):
        pytest.skip(f"no sandbox of kind {request.param}: {reason}")
    os.environ[_SECRET] = "42"
    with SandboxedRankServer(request.param, preload=("exercises.network", "exercises.rank_tests")) as server:
        del os.environ[_SECRET]
        yield server


@pytest.fixture
def attempt(jail):
    """`attempt(code)`: run code that assigns to `found` in the sandbox, which is new for the next test; return that."""

    def run(code):
        lines = textwrap.indent(textwrap.dedent(code), "    ")
        text = f"import json, os, time\nfrom exercises.testing import Wrong\n\ndef tried():\n{lines}\n"
        text += '    raise Wrong("wrong", "told", got=json.dumps(found))\n'
        with open_scratch(jail) as folder, open_scratch(jail, writable=True) as place:
            answer = folder.write("ch/answer.py", b"")
            tests = compile_tests(text, "/test_tried.py")
            asked = Request(answer, "/test_tried.py", tests, ("tried",), (), (), (), (), place.path, 1 << 30, "token")
            finding = run_and_diagnose(Run(asked, place, b""), 1, jail, _HANG_S)
        assert finding.what == "told", finding
        return json.loads(finding.got)

    yield run
    if jail.left_behind():
        jail.renew()


def _error_of(statement):
    return (
        f"try:\n    {statement}\n    found = 'possible'\nexcept Exception as error:\n    found = type(error).__name__\n"
    )


def _children(jail):
    return [pid for pid in jail._processes() if pid != jail._server_pid]


@pytest.mark.exhaustive
def test_answers_get_the_same_verdict_in_the_sandbox(jail, server, tmp_path):
    exercise = Catalogue()["ring_all_reduce"]
    wrong = tmp_path / "ring_all_reduce.py"
    wrong.write_text(exercise.solution.read_text().replace("return ", "return None and "))
    for file in (exercise.solution, wrong, exercise.stub):
        assert check(exercise, file, jail).results == check(exercise, file, server).results
    assert jail.left_behind() == []


@pytest.mark.parametrize(
    "start",
    [
        "import pty; pid, _ = pty.fork()",
        "pid = os.fork()",
        "import subprocess; pid = subprocess.Popen(['/bin/sleep', '1000'], start_new_session=True).pid",
        "pid = os.posix_spawn('/bin/sleep', ['sleep', '1000'], {}, setsid=True)",
    ],
    ids=["pty.fork", "os.fork", "_posixsubprocess", "posix_spawn"],
)
def test_a_process_that_leaves_its_group_ends_with_the_sandbox(jail, attempt, start):
    found = attempt(f"""
        import signal
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which the end of a terminal sends
        {start}
        if pid == 0:
            try:
                os.setsid()
            finally:
                time.sleep(1000)
        found = pid
        time.sleep(0.2)
        """)
    assert found > 0
    assert any(text.startswith("process") for text in jail.left_behind())
    pids = _children(jail)
    jail.renew()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 5.0)
    assert jail.left_behind() == []


def test_processes_are_limited(jail, attempt):
    started = attempt("""
        found = 0
        try:
            for found in range(670):
                if os.fork() == 0:
                    os.setsid()
                    time.sleep(1000)
        except OSError:
            pass
        """)
    assert 10 < started < sandbox.PROCESSES
    jail.renew()
    assert jail.left_behind() == []


@pytest.mark.parametrize(
    "read",
    [
        "open({path!r}).read(1)",
        "__import__('sqlite3').connect('file:{path}?mode=ro', uri=True).execute('select * from sqlite_master')",
        "__import__('torch').from_file({path!r}, size=1, dtype=__import__('torch').uint8)",
        "os.open({path!r}, os.O_RDONLY)",
    ],
    ids=["open", "sqlite3", "torch.from_file", "os.open"],
)
def test_tests_solutions_answers_and_submissions_cannot_be_read(jail, attempt, tmp_path, read):
    submission = tmp_path / "of_another.py"
    submission.write_text("x = 1\n")
    exercise = Catalogue()[_EXERCISE]
    secrets = [exercise.test_file, exercise.solution, exercise.answers, submission]
    if jail.kind == "user" and jail.readable_secrets():  # said in `protections`; permissions are the only protection
        tmp_path.chmod(0o700)
        secrets = [submission]
    for path in secrets:
        assert path.exists()
        error = attempt(_error_of(read.replace("{path!r}", repr(str(path))).replace("{path}", str(path))))
        assert error in ("FileNotFoundError", "PermissionError", "OperationalError", "RuntimeError"), (path, error)


@pytest.mark.parametrize("path", [ROOT / "minidist/mesh.py", ROOT / "exercises/testing.py", Path("/usr/bin/env")])
def test_the_course_cannot_be_written(attempt, path):
    assert attempt(_error_of(f"os.open({str(path)!r}, os.O_RDWR)")) in ("OSError", "PermissionError")


def test_no_network_but_its_own_loopback(jail, attempt):
    if jail.kind == "user" and "network" not in jail._gained:
        pytest.skip("this machine permits no network of its own, which `protections` says")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        error = attempt("import socket\n" + _error_of(f"socket.create_connection(('127.0.0.1', {port}), timeout=5)"))
    assert error == "ConnectionRefusedError"
    assert attempt("import socket\nfound = [name for _, name in socket.if_nameindex()]") == ["lo"]


def test_a_port_is_free_again_once_its_process_is_gone(jail, attempt):
    port = attempt("""
        import socket
        listening = socket.create_server(("127.0.0.1", 0))
        found = listening.getsockname()[1]
        if os.fork() == 0:
            os.setsid()
            time.sleep(1000)
        """)
    jail.renew()
    assert attempt("import socket\n" + _error_of(f"socket.create_server(('127.0.0.1', {port}))")) == "possible"


def test_files_and_shared_memory_end_with_the_sandbox(jail, attempt):
    name = f"left-{os.getpid()}"
    attempt(f"""
        from multiprocessing import shared_memory
        open("/dev/shm/{name}", "w").write("x")
        open(os.path.join(os.environ["TMPDIR"], "{name}"), "w").write("x")
        shared_memory.SharedMemory("{name}-segment", create=True, size=100)
        found = 0
        """)
    jail.renew()
    assert attempt("found = os.listdir('/dev/shm') + os.listdir(os.environ['TMPDIR'])").count(name) == 0
    assert not [file for file in os.listdir("/dev/shm") if file.startswith(name)]


def test_files_and_memory_are_limited(attempt):
    big = "with open(os.path.join(os.environ['TMPDIR'], 'big'), 'wb') as file: file.truncate(1 << 31)"
    assert attempt("import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n" + _error_of(big)) == "OSError"
    more = f"import resource; resource.setrlimit(resource.RLIMIT_DATA, (-1, -1)); x = bytearray({sandbox.MEMORY_BYTES})"
    assert attempt(_error_of(more)) in ("ValueError", "PermissionError")
    most = "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))"
    assert attempt(_error_of(f"{most}; x = bytearray({sandbox.MEMORY_BYTES})")) == "MemoryError"


def test_the_grader_and_the_rank_server_cannot_be_touched(attempt):
    assert attempt(_error_of(f"os.kill({os.getpid()}, 0)")) in ("ProcessLookupError", "PermissionError")
    assert attempt(_error_of("open(f'/proc/{os.getppid()}/mem', 'r+b')")) == "PermissionError"
    assert attempt(f"found = [{_SECRET!r} in os.environ, os.getuid() == 0]") == [False, False]


def test_a_rank_cannot_make_the_grader_run_code(jail, attempt, tmp_path):
    marker = tmp_path / "made"

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    for message in (pickle.dumps(Evil()), pickle.dumps(("value", Evil())), pickle.dumps(("error", "text"))):
        with pytest.raises(pickle.UnpicklingError):
            jail.load_message(message)
    assert not marker.exists()
    error = RankError("ValueError", "text", "", "")
    assert jail.load_message(pickle.dumps(("error", error))) == ("error", error)


def test_the_grader_follows_no_link_of_a_learner_and_waits_for_no_pipe(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("the solution")
    with create_scratch() as scratch:
        folder = Path(scratch.path)
        (folder / "note-0").symlink_to(secret)
        os.mkfifo(folder / "note-1")
        (folder / "note-2").write_bytes(b"x" * (3 << 20))
        assert scratch.read("note-0") is None
        assert scratch.read("note-1") is None
        assert len(scratch.read("note-2")) == 1 << 20
        assert scratch.read("note-3") is None
    assert not folder.exists()


def test_a_server_that_its_ranks_have_killed_is_replaced(jail, server):
    exercise = Catalogue()[_EXERCISE]
    text = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n"
    with open_scratch(jail) as folder, open_scratch(jail, writable=True) as place:
        answer = folder.write("ch/answer.py", b"")
        tests = compile_tests(text, "/test_tried.py")
        asked = Request(answer, "/test_tried.py", tests, ("tried",), (), (), (), (), place.path, 1 << 30, "token")
        assert run_and_diagnose(Run(asked, place, b""), 1, jail, _HANG_S) is not None
    assert check(exercise, exercise.solution, jail).passed


def test_protections_say_what_there_is(jail):
    text = "\n".join(jail.protections)
    assert {"bubblewrap": "bubblewrap", "user": "a separate user"}[jail.kind] in text
    assert f"{sandbox.PROCESSES} processes" in text
    assert ("NOT protected" in text) == (jail.kind == "user" and bool(jail.readable_secrets()))


def test_a_machine_without_a_sandbox_is_told_what_to_do(monkeypatch):
    monkeypatch.setattr(sandbox, "why_not", lambda kind: f"no {kind}")
    with pytest.raises(UserError, match="Install bubblewrap, or give --sandbox none if you trust every submission"):
        sandbox.find_kind()
    with pytest.raises(UserError, match="is not known; possible are bubblewrap, user and auto"):
        SandboxedRankServer("docker")


@pytest.mark.exhaustive
@pytest.mark.skipif(os.getuid() != 0 or shutil.which("bwrap") is None, reason="needs root and bubblewrap")
@pytest.mark.skipif(not sandbox.why_not("user"), reason="the tests above have run for this kind")
def test_a_separate_user_where_its_folders_are_readable():
    """Run the tests above for the kind "user" where Python lies in root's own folder: with that folder opened."""
    command = [shutil.which("bwrap"), "--dev-bind", "/", "/", "--cap-add", "ALL", "--die-with-parent"]
    for prefix in dict.fromkeys((sys.base_prefix, sys.prefix, str(ROOT))):
        if not prefix.startswith("/root/"):
            continue
        folders = [str(folder) for folder in reversed(Path(prefix).parents)][1:]
        command += ["--perms", "0755", "--tmpfs", folders[0]]
        for folder in folders[1:]:
            command += ["--perms", "0755", "--dir", folder]
        command += ["--ro-bind", prefix, prefix]
    command += [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "[user", __file__]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert "passed" in ran.stdout, ran.stdout
