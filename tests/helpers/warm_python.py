"""Stand-ins for `subprocess.Popen` and `subprocess.run` that start Python programs without importing torch again.

A new interpreter takes seconds to import torch. So a process that has imported it, and has run nothing, forks for every
program: the fork gets the program's command line, environment, folder, streams, session and signals, and runs it as
`__main__`. What the program starts with `subprocess.Popen` is forked too, from the program itself: its rank server, the
workers of torchrun. Whatever a fork cannot stand in for starts as a real process: another program than this Python,
unknown options, environment variables that torch reads when it is imported, a program that has threads.

popen = warm_python.popen
popen([sys.executable, "-m", "minidist", "--version"], stdout=subprocess.PIPE)   # as subprocess.Popen
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What tests, programs and ranks import from other packages.
LIBRARIES = (
    *("torch", "torch._dynamo", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.pipelining"),
    *("torch.distributed.optim", "torch.distributed.checkpoint", "torch.distributed.tensor.parallel"),
    *("torch.distributed.launcher.api", "safetensors.torch", "matplotlib.figure", "matplotlib.image"),
    *("pytest", "hypothesis"),
)
# What the commands and their ranks import from this repository.
COMMANDS = (
    *("minidist.tools.cli", "minidist.tools.launch.server", "minidist.tools.launch.rank", "minidist.tools.launch.run"),
    *("minidist.tools.launch.start", "minidist.tools.parity.ranks", "minidist.tools.shm.group_creation"),
    *("exercises.check", "exercises.rank_tests", "exercises.network", "exercises.side_effects", "exercises.conditions"),
)
_START_S = 120.0
# Variables that torch and its libraries read when they are loaded; the others are read when they are needed.
_READ_AT_IMPORT = ("CUDA", "GOMP_", "KMP_", "LD_", "MALLOC", "MKL_", "OMP_", "PYTHON", "PYTORCH", "TORCH")
# These have an effect in a fork too, or (OpenBLAS) only say that its threads are not started.
_ADOPTED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONUNBUFFERED")
# Read at run time: the folders and the switch of torch's compiler, torchrun's own.
_READ_LATER = ("TORCHELASTIC_", "TORCHINDUCTOR_CACHE_DIR", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_NCCL_")
# Of a torchrun agent: its rendezvous store, and what keeps its place there. No rank needs them.
_AGENT_THREADS = {"pt_tcpstore_uv", "pt_tcpstore", "pt_elastic"}
_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}


@dataclass(frozen=True)
class _Program:
    """What a fork runs. kind: "-m", "-c" or "" for a file; target: the module, the code or the file."""

    kind: str
    target: str
    arguments: tuple[str, ...]
    has_safe_path: bool
    is_unbuffered: bool


def _parse(command: Sequence[str]) -> _Program | None:
    """Parse a command line of this Python; None if a fork cannot stand in for it."""
    if not command or command[0] != sys.executable:
        return None
    words, flags = list(command[1:]), set()
    while words and words[0] in ("-u", "-P"):
        flags.add(words.pop(0))
    if len(words) > 1 and words[0] in ("-m", "-c"):
        kind, target, *arguments = words
    elif words and not words[0].startswith("-"):
        kind, (target, *arguments) = "", words
    else:
        return None
    return _Program(kind, target, tuple(arguments), "-P" in flags, "-u" in flags)


def _read_at_import(environ) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_READ_AT_IMPORT) and name not in _ADOPTED and not name.startswith(_READ_LATER)
    }


class WarmPython:
    """A process that has imported modules and forks programs. Starts when it is first needed; `close` ends it.

    preload: the modules. parent: another one, which has imported some of them already and forks this process.
    """

    def __init__(self, preload: Sequence[str], parent: "WarmPython | None" = None):
        self._preload, self._parent = tuple(preload), parent
        self._process: subprocess.Popen | None = None
        self._read_at_import: dict[str, str] = {}
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The id of the process; None if it does not run."""
        return self._process.pid if self._process else None

    def popen(self, command: Sequence, **options) -> subprocess.Popen:
        """Start a program as `subprocess.Popen` does: as a fork if possible, else as a real process."""
        if _server_environ is not None:  # this process is a fork: `subprocess.Popen` forks from it
            return subprocess.Popen(list(map(str, command)), **options)
        return _WarmPopen(self, list(map(str, command)), **options)

    def run(self, command: Sequence, *, timeout: float, **options) -> subprocess.CompletedProcess:
        """Run a program as `subprocess.run` does, which captures its output as text."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
        with self.popen(command, **options) as process:
            try:
                output, errors = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    def close(self) -> None:
        """End the process and whatever it has forked and still runs."""
        if self._process:
            self._socket.close()
            self._process.wait(10)
            self._process = None

    def start(self) -> None:
        """Start the process if it does not run; do not wait until it has imported its modules."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        code = f"from tests.helpers.warm_python import serve; serve({theirs.fileno()}, {self._preload!r})"
        environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self._read_at_import = _read_at_import(environ)
        popen = self._parent.popen if self._parent else subprocess.Popen
        self._process = popen(
            [sys.executable, "-P", "-c", code],
            env={
                **environ,
                "OPENBLAS_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
            },  # a process that forks has no threads
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        theirs.close()

    def _fork(self, request: dict, fds: Sequence[int]) -> socket.socket:
        """Have a program forked; return the socket that reports its process id and, later, its exit code."""
        ours, theirs = socket.socketpair()
        data = json.dumps(request).encode()
        with theirs, self._lock:
            socket.send_fds(self._socket, [len(data).to_bytes(4, "big")], [theirs.fileno(), *fds])
            self._socket.sendall(data)
        return ours

    def can_fork(self, environ: dict[str, str]) -> bool:
        """Start this process; return whether a program with this environment can be forked from it."""
        self.start()
        return sys.platform == "linux" and _read_at_import(environ) == self._read_at_import


class _ProgramPopen(subprocess.Popen):
    """A Popen of a Python program that is forked from this process if possible."""

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, *more
    ):  # fmt: skip
        *owner, start_new_session, process_group = more
        environ = dict(os.environ if env is None else env)
        program = None if isinstance(args, str | bytes | os.PathLike) else _parse(list(map(os.fsdecode, args)))
        is_plain = not (executable or preexec_fn or shell or process_group != -1) and close_fds and restore_signals
        is_plain = is_plain and all(each in (None, -1) for each in owner)
        if program is None or not is_plain or not self._can_fork(environ):
            super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, *more,
            )  # fmt: skip
            return
        streams = [number if given == -1 else given for number, given in enumerate((p2cread, c2pwrite, errwrite))]
        request = {
            "program": asdict(program),
            "environ": environ,
            "folder": os.path.abspath(os.fspath(cwd) if cwd is not None else os.getcwd()),
            "is_new_session": bool(start_new_session),
            "ignored": [int(each) for each in signal.valid_signals() if signal.getsignal(each) == signal.SIG_IGN],
            "mask": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            "pass_fds": list(pass_fds),
        }
        self.pid = self._fork(request, streams, list(pass_fds))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _can_fork(self, environ: dict[str, str]) -> bool:
        if _read_at_import(environ) != _server_environ:
            return False
        # With one thread for computing, torch has no others: the remaining one is of pytest's deadlines.
        if os.environ.get("OMP_NUM_THREADS") == "1" and threading.active_count() == 1:
            return True
        threads = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()]
        return all((task / "comm").read_text().strip() in _AGENT_THREADS for task in threads)

    def _fork(self, request: dict, streams: list[int], fds: list[int]) -> int:
        pid = os.fork()
        if not pid:
            with _exits_with_code():
                _run(request, streams, dict(zip(request["pass_fds"], fds, strict=True)))
        return pid


class _WarmPopen(_ProgramPopen):
    """A Popen of a Python program that is forked from a warm process: no child of this process."""

    def __init__(self, warm: WarmPython, command: list[str], **options):
        self._warm, self._report = warm, None
        super().__init__(command, **options)

    def _can_fork(self, environ: dict[str, str]) -> bool:
        return self._warm.can_fork(environ)

    def _fork(self, request: dict, streams: list[int], fds: list[int]) -> int:
        self._report = self._warm._fork(request, [*streams, *fds])
        if not select.select([self._report], [], [], _START_S)[0]:
            raise TimeoutError(f"the process that forks programs did not answer within {_START_S:g} s")
        return self._read_number()

    def _read_number(self) -> int:
        data = self._report.recv(4, socket.MSG_WAITALL)
        if len(data) < 4:
            raise ConnectionError("the process that forks programs has ended")
        return int.from_bytes(data, "big", signed=True)

    def _internal_poll(self, *args, **options):
        if self._report is None:
            return super()._internal_poll(*args, **options)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(0)
        return self.returncode

    def _wait(self, timeout):
        if self._report is None:
            return super()._wait(timeout)
        with self._waitpid_lock:
            if self.returncode is None:
                if not select.select([self._report], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout)
                self.returncode = self._read_number()
                self._report.close()
        return self.returncode


# In the forked processes

_server_environ: dict[str, str] | None = None  # what the warm process had when it imported the modules
_kept: list = []  # objects of the forking program whose end would close a file of the forked one


def _leave_out_of_stacks(function):
    """Give a function the file name of code without a file: rank stacks are shown without such frames."""
    function.__code__ = function.__code__.replace(co_filename="<warm python>")
    return function


@_leave_out_of_stacks
def serve(fd: int, preload: Sequence[str]) -> None:
    """Import modules, then fork a program for every request from socket `fd` until the other end is closed."""
    global _server_environ
    _server_environ = _read_at_import(os.environ)
    for name in preload:
        importlib.import_module(name)
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False  # torch's hundreds would cost each program 30 ms; its own still run
    gc.collect()
    gc.freeze()
    requests = socket.socket(fileno=fd)
    wake_receiver, wake_sender = socket.socketpair()
    for end in (wake_receiver, wake_sender):
        end.setblocking(False)
    signal.set_wakeup_fd(wake_sender.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    reports: dict[int, socket.socket] = {}
    while True:
        ready = select.select([requests, wake_receiver], [], [])[0]
        if wake_receiver in ready:
            wake_receiver.recv(4096)
        for pid in list(reports):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _report(reports.pop(pid), os.waitstatus_to_exitcode(status))
        if requests in ready:
            head, fds, *_ = socket.recv_fds(requests, 4, 256)
            if not head:
                break
            request = json.loads(requests.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
            pid = os.fork()
            if not pid:
                with _exits_with_code():
                    signal.set_wakeup_fd(-1)
                    _run(request, list(fds[1:4]), dict(zip(request["pass_fds"], fds[4:], strict=True)))
            reports[pid] = socket.socket(fileno=fds[0])
            reports[pid].sendall(pid.to_bytes(4, "big"))
            for each in fds[1:]:
                os.close(each)
    for pid in reports:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _report(to: socket.socket, code: int) -> None:
    with to, contextlib.suppress(OSError):  # nobody waits for this program any more
        to.sendall(code.to_bytes(4, "big", signed=True))


@contextlib.contextmanager
def _exits_with_code():
    """End this process with the body, as an interpreter ends: no frame above it belongs to the child of a fork."""
    code = 1
    try:
        try:
            yield
            code = 0
        except SystemExit as end:
            if not isinstance(end.code, int | None):
                print(end.code, file=sys.stderr)
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
    finally:
        os._exit(code & 0xFF)


@_leave_out_of_stacks
def _run(request: dict, streams: list[int], passed: dict[int, int]) -> None:
    """Make this process, a fork, that of the program, and run it. passed: the file at each number that it inherits."""
    program = _Program(**request["program"])
    environ = request["environ"]
    gc.collect()
    gc.freeze()
    _kept.extend([sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__])
    _kept.append(sys.modules["__main__"])
    if request["is_new_session"]:
        os.setsid()
    _place_files({0: streams[0], 1: streams[1], 2: streams[2], **passed})
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(environ)
    _reset_signals(set(request["ignored"]), request["mask"])
    is_unbuffered = program.is_unbuffered or bool(environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _open_output(1, is_unbuffered)
    sys.stderr = sys.__stderr__ = _open_output(2, True, errors="backslashreplace")
    sys.dont_write_bytecode = bool(environ.get("PYTHONDONTWRITEBYTECODE"))
    if (threads := environ.get("OMP_NUM_THREADS")) and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(threads))
    _set_import_path(program, environ.get("PYTHONPATH", ""))
    subprocess.Popen = _ProgramPopen
    if handler := sys.modules.get("torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"):
        handler.Popen = _ProgramPopen
    if program.kind == "-m":
        sys.argv = [program.target, *program.arguments]
        sys.modules.pop(program.target if program.target not in _packages() else f"{program.target}.__main__", None)
        runpy.run_module(program.target, run_name="__main__", alter_sys=True)
    elif program.kind == "-c":
        sys.argv = ["-c", *program.arguments]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(program.target, "<string>", "exec"), vars(main))
    else:
        sys.argv = [program.target, *program.arguments]
        runpy.run_path(program.target, run_name="__main__")


def _packages() -> set[str]:
    """Return the names of the imported packages."""
    return {name for name, module in sys.modules.items() if hasattr(module, "__path__")}


def _place_files(wanted: dict[int, int]) -> None:
    """Put these open files at these numbers, and close all others."""
    high = max(wanted) + 1
    moved = {number: fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, high) for number, file in wanted.items()}
    for number, file in moved.items():
        os.dup2(file, number)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in wanted:
            with contextlib.suppress(OSError):
                os.close(number)


def _reset_signals(ignored: set[int], mask: list[int]) -> None:
    """Set the signals as a new interpreter does that is started by a process which ignores these."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        is_ignored = number in _IGNORED_BY_PYTHON or number in ignored
        signal.signal(number, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _open_output(number: int, writes_through: bool, errors: str = "strict"):
    stream = open(number, "w", errors=errors, closefd=False)  # noqa: SIM115
    stream.reconfigure(line_buffering=stream.isatty() or number == 2, write_through=writes_through)
    return stream


_PATH_OF_INSTALLATION = [path for path in sys.path if path and os.path.abspath(path) != str(ROOT)]


# For programs of a copy of this repository, whose modules must not be imported yet.
warm_libraries = WarmPython(LIBRARIES)
# For the commands of this repository.
warm_python = WarmPython(COMMANDS, parent=warm_libraries)


def close_all() -> None:
    """End the warm processes of this module."""
    warm_python.close()
    warm_libraries.close()


def _set_import_path(program: _Program, pythonpath: str) -> None:
    first = {"-m": os.getcwd(), "-c": ""}.get(program.kind, os.path.dirname(os.path.abspath(program.target)))
    added = [os.path.abspath(path) for path in pythonpath.split(os.pathsep) if path]
    sys.path[:] = [*([] if program.has_safe_path else [first]), *added, *_PATH_OF_INSTALLATION]
    sys.path_importer_cache.clear()
