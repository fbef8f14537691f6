"""A sandbox for the code of others: a rank server that the code of its ranks cannot leave.

`SandboxedRankServer` takes the place of a `RankServer` in `exercises.check.check`. The grader itself stays outside: it
sends the text of the tests to the ranks, and receives what they found. Two kinds of sandbox are possible:

* "bubblewrap": namespaces of its own for processes, network, IPC and file names. Of the files only Python, the package
  and the grader's modules are there, read-only: no tests, solutions, answers or submissions.
* "user": without bubblewrap, and only for root: a user of its own for every sandbox, and a network of its own if the
  system permits that. Files are protected by their permissions alone.

Both have a private folder for temporary files, and limits on processes, memory, open files and the size of a file.
`protections` says what a sandbox really has.

What no sandbox can give: the tests run in the processes of the learner's code, because they look at tensors, traffic
and memory there. Code that is written to deceive its own tests can still do so. It cannot read the text of the tests,
and it cannot touch the grader, other submissions or the machine.
"""

import contextlib
import io
import os
import pickle
import pwd
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from exercises.catalogue import ROOT
from exercises.check import PRELOAD
from exercises.scratch import Scratch, create_scratch
from minidist.errors import RunError, UserError
from minidist.tools.launch import RankServer
from minidist.tools.launch.failure import RankError

KINDS = ("bubblewrap", "user")
PROCESSES = 400  # at most, in one sandbox
MEMORY_BYTES = 4 << 30  # of one process
_TOTAL_MEMORY_BYTES = 8 << 30  # of one sandbox, where control groups can be had
_TEMPORARY_BYTES = 512 << 20  # of /tmp and of /dev/shm
_FIRST_UID, _UIDS = 61100, 100
_SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin")
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "nsswitch.conf", "hosts", "alternatives")
_VARIABLES = ("LANG", "LC_ALL", "OMP_WAIT_POLICY", "LD_LIBRARY_PATH")
_END_S = 10.0
_ANSWER_S = 60.0
_MESSAGE_KINDS = {"value": bytes, "error": RankError, "exit": int}


class SandboxedRankServer(RankServer):
    """A rank server whose ranks run in a sandbox. A context manager.

    kind: "bubblewrap", "user" or "auto", the first that this machine has. preload: as for RankServer. root: the course.
    protections: what the sandbox has, one sentence per item; complete once the server is ready. Raises UserError if the
    kind cannot be had.
    """

    def __init__(self, kind: str = "auto", preload: Sequence[str] = PRELOAD, root: Path = ROOT):
        self.kind = find_kind() if kind == "auto" else kind
        if self.kind not in KINDS:
            raise UserError(f"the sandbox {kind!r} is not known; possible are {', '.join(KINDS)} and auto")
        if reason := why_not(self.kind):
            raise UserError(f"the sandbox {self.kind} cannot be had: {reason}")
        self._course = root
        self._uid_lock, self._uid = _reserve_uid() if os.getuid() == 0 else (None, None)
        self._folders: tuple[int, ...] = ()
        self._gained: tuple[str, ...] = ()
        self._listening: socket.socket | None = None
        self._group: _ControlGroup | None = None
        self._private: str | None = None  # the folder for temporary files of a sandbox without namespaces
        self._before: list[set[str]] = []
        super().__init__(method="fork", preload=preload)

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def protections(self) -> list[str]:
        """What the sandbox protects, in sentences."""
        named = {"bubblewrap": "bubblewrap", "user": "a separate user, without bubblewrap"}[self.kind]
        items = [f"sandbox: {named}" + (f", as user {self._uid}" if self._uid else "")]
        if self.kind == "bubblewrap":
            items += [
                "network: none but a loopback of its own",
                "files: Python, the package and the grader's modules, read-only; tests, solutions, answers and "
                "submissions are not there",
                "processes: a namespace of its own, so that all of them end with the sandbox",
            ]
        else:
            own = "network" in self._gained
            items += [
                "network: " + ("none but a loopback of its own" if own else "NOT protected: that of this machine"),
                "processes: all of this user are killed at the end",
            ]
            readable = self.readable_secrets()
            what = f"NOT protected: {', '.join(readable)} can be read; chmod -R o= takes that right away"
            items.append("files: " + (what if readable else "tests, solutions and answers cannot be read"))
        total = f", {_TOTAL_MEMORY_BYTES >> 30} GiB in all" if self._group else ""
        items.append(f"limits: {PROCESSES} processes, {MEMORY_BYTES >> 30} GiB of memory per process{total}")
        return items

    def readable_secrets(self) -> list[str]:
        """List the folders of tests, solutions and answers that the user of this sandbox may read."""
        if self.kind == "bubblewrap":
            return []
        folders = [self._course / "solutions", *sorted((self._course / "exercises").glob("ch*"))]
        return [str(folder.relative_to(self._course)) for folder in folders if _others_may_read(folder)]

    @contextlib.contextmanager
    def open_scratch(self, writable: bool) -> Iterator[Scratch]:
        """Return a context manager for a folder that this process shares with the ranks: see `exercises.scratch`."""
        self.ensure_ready()
        with create_scratch(self._scratch, self._folders[0], self._uid if writable else None) as scratch:
            yield scratch

    def left_behind(self) -> list[str]:
        """List the processes and temporary files in the sandbox that do not belong to the server: a check is over."""
        self.ensure_ready()
        processes = [f"process {_read_command_line(pid)}" for pid in self._processes() if pid != self._server_pid]
        now = [set(os.listdir(folder)) for folder in self._folders]
        names = [(self._scratch, "the folder of checks"), (self._temporary, "/tmp"), ("", "/dev/shm")]
        files = [
            f"{name} in {place}"
            for (_, place), files, before in zip(names, now, self._before, strict=True)
            for name in sorted(files - before)
        ]
        return processes + (files if self.kind == "bubblewrap" else [text for text in files if "/dev/shm" not in text])

    def renew(self) -> None:
        """Kill everything in the sandbox and delete its files; the next job starts a new one."""
        for job in list(self._jobs.values()):
            job.kill()
        self._connection.socket.close()
        self._kill_and_clean_up()
        self._start_server()

    def close(self) -> None:
        """Kill everything in the sandbox, and wait until it has ended."""
        for job in list(self._jobs.values()):
            with contextlib.suppress(Exception):
                job.kill()
        self._connection.socket.close()
        self._kill_and_clean_up()
        if self._uid_lock is not None:
            self._uid_lock.close()

    # -- how the server is started and talks to this process -----------------------------------------------------------

    @staticmethod
    def load_message(data: bytes) -> Any:
        """Unpickle a message or result of a rank without running code: plain values and RankError only."""
        message = _PlainUnpickler(io.BytesIO(data)).load()
        if isinstance(message, tuple) and len(message) == 2 and message[0] in _MESSAGE_KINDS:
            if type(message[1]) is not _MESSAGE_KINDS[message[0]]:
                raise pickle.UnpicklingError("a message of another form")
            return message
        if type(message) is not str:
            raise pickle.UnpicklingError("a result of another type")
        return message

    def create_listening_socket(self, backlog: int) -> socket.socket:
        """Return a socket that listens in the network of the sandbox."""
        self.ensure_ready()
        self._listening = None
        self._send({"op": "listen", "backlog": backlog})
        self._receive_until(lambda: self._listening is not None)
        return self._listening

    def check_network(self, ranks: int) -> None:
        """Do nothing: the sandbox has a loopback interface of its own."""

    def ensure_ready(self) -> None:
        """Block until the server can start ranks; restart the sandbox if the server has died."""
        if self._has_ended or self._process.poll() is not None:
            self.renew()
        self._receive_until(lambda: self._is_ready)

    def _receive_until(self, arrived) -> None:
        """Handle messages until `arrived()` is True. Raises RunError if the sandbox does not answer."""
        end_s = time.monotonic() + _ANSWER_S
        while not arrived():
            wait_s = max(0.0, end_s - time.monotonic())
            if not select.select([self._connection.socket], [], [], wait_s)[0] or not self._receive():
                raise RunError(f"the sandbox ({self.kind}) does not answer; see its output above")

    def _inherited_environ(self) -> Mapping[str, str]:
        """Return the environment variables of the sandbox."""
        kept = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        home = {"HOME": self._temporary, "TMPDIR": self._temporary, "USER": "student", "LOGNAME": "student"}
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # torch's store warns that it finds no host name for 127.0.0.1
        python = {"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}
        return {**kept, **home, **quiet, **python}

    def _start_server(self) -> None:
        """Start the sandbox and the rank server in it."""
        own_end, server_end = socket.socketpair()
        if self.kind == "user":
            self._private = tempfile.mkdtemp(prefix="minidist-sandbox-")
            os.chown(self._private, self._uid, self._uid)
        self._temporary = self._private or "/tmp"
        plain_user = self.kind == "user"
        options = (self._uid, plain_user, PROCESSES, MEMORY_BYTES, self._temporary)
        code = (
            f"import sys; sys.path[:] = {self._import_path()!r}; from exercises.sandbox_process import main; "
            f"main({server_end.fileno()}, {self._preload!r}, *{options!r})"
        )
        command = [sys.executable, "-P", "-c", code]
        if not plain_user:
            command = [*self._bubblewrap_command(), "--", *command]
        self._group = _ControlGroup.create()
        self._process = subprocess.Popen(
            command,
            env=dict(self._inherited_environ()),
            cwd=self._temporary,
            stdin=subprocess.DEVNULL,
            pass_fds=(server_end.fileno(),),
            start_new_session=True,
            preexec_fn=self._group.enter if self._group else None,
        )
        server_end.close()
        self._connect(own_end)

    def _import_path(self) -> list[str]:
        """Return what the processes of the sandbox import from: the course, Python and its installed packages."""
        inside = (*_SYSTEM, sys.base_prefix, sys.prefix)
        return [str(self._course), *(entry for entry in sys.path if any(_is_below(entry, name) for name in inside))]

    def _bubblewrap_command(self) -> list[str]:
        """Return the command that makes the namespaces."""
        args = [shutil.which("bwrap"), "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
        args += ["--unshare-cgroup-try", "--die-with-parent", "--hostname", "localhost", "--clearenv"]
        if self._uid is None:
            args += ["--unshare-user", "--disable-userns"]
        else:  # the process drops these when it becomes the sandbox's user
            args += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        for name, value in self._inherited_environ().items():
            args += ["--setenv", name, value]
        args += ["--proc", "/proc", "--dev", "/dev"]
        for folder in ("/tmp", "/dev/shm"):
            args += ["--perms", "1777", "--size", str(_TEMPORARY_BYTES), "--tmpfs", folder]
        visible = self._list_visible_paths()
        folders = dict.fromkeys(str(folder) for path in visible for folder in reversed(Path(path).parents))
        for folder in [
            name for name in folders if name not in ("/", "/tmp", *visible)
        ]:  # bubblewrap would close them to other users
            args += ["--perms", "0755", "--dir", folder]
        for path in visible:
            args += ["--ro-bind-try", path, path]
        return [*args, "--chdir", "/tmp"]

    def _list_visible_paths(self) -> list[str]:
        """List the files and folders of this machine that the sandbox has."""
        modules = sorted(map(str, (self._course / "exercises").glob("*.py")))
        course = [str(self._course / "minidist"), *modules]
        prefixes = [sys.base_prefix, sys.prefix]
        return [*_SYSTEM, *(f"/etc/{name}" for name in _ETC), *dict.fromkeys(prefixes), *course]

    def _receive(self) -> bool:
        """Handle the messages that have arrived from the sandbox, which are not trusted; return False at its end."""
        messages = self._connection.receive()
        self._has_ended = messages is None
        for message, fds in messages or []:
            if message["event"] == "folders":
                self._folders, self._gained, self._scratch = fds, tuple(message["gained"]), message["scratch"]
            elif message["event"] == "listening":
                self._listening = socket.socket(fileno=fds[0])
            elif message["event"] == "ready":
                self._is_ready = True
                self._server_pid = self._find_server()
                self._before = [set(os.listdir(folder)) for folder in self._folders]
            elif message["job"] in self._jobs:
                if message["event"] == "started":
                    message["pid"] = self._find_outer_pid(message["pid"])
                self._jobs[message["job"]]._on_rank_event(message)
        return messages is not None

    # -- the processes of the sandbox, by their process ids outside ----------------------------------------------------

    def _find_server(self) -> int:
        """Return the process id of the rank server, below the processes of bubblewrap."""
        pid = self._process.pid
        while self.kind == "bubblewrap" and (children := _child_pids(pid)):
            pid = children[0]
        return pid

    def _processes(self) -> list[int]:
        """List the processes in the sandbox, without those of bubblewrap itself."""
        if self.kind == "user":
            return _processes_of(self._uid)
        outer = _child_pids(self._process.pid)
        found = [child for pid in outer for child in _child_pids(pid)]
        for pid in found:  # grows in the loop
            found += _child_pids(pid)
        return found

    def _find_outer_pid(self, inner: int) -> int:
        """Return the process id, outside of the sandbox, of its process `inner`; 0 if there is none."""
        if self.kind == "user":
            return inner
        return next((pid for pid in _child_pids(self._server_pid) if _inner_pid(pid) == inner), 0)

    def _kill_and_clean_up(self) -> None:
        """Kill all processes of the sandbox; wait until they have ended; remove its files."""
        with contextlib.ExitStack() as stack:
            ends = []
            if self.kind == "bubblewrap":
                for pid in _child_pids(self._process.pid):  # its first process: with it all others are killed
                    with contextlib.suppress(OSError):
                        ends.append(stack.enter_context(open(os.pidfd_open(pid), "rb", closefd=True)))
            self._process.kill()
            self._process.wait()
            for end in ends:
                select.select([end], [], [], _END_S)
        if self.kind == "user":
            _kill_user(self._uid)
        for folder in self._folders:
            os.close(folder)
        self._folders = ()
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)
            for folder in ("/dev/shm", "/tmp", "/var/tmp", "/dev/mqueue"):
                _delete_files_of(self._uid, folder)
        if self._group:
            self._group.remove()
            self._group = None


def find_kind() -> str:
    """Return the best kind of sandbox that this machine has. Raises UserError if it has none."""
    for kind in KINDS:
        if not why_not(kind):
            return kind
    raise UserError(
        "this machine has no sandbox: "
        + "; ".join(f"{kind}: {why_not(kind)}" for kind in KINDS)
        + ". Install bubblewrap, or give --sandbox none if you trust every submission"
    )


def why_not(kind: str, root: Path = ROOT) -> str:
    """Return why this machine cannot have a kind of sandbox; "" if it can."""
    if sys.platform != "linux":
        return "it needs Linux"
    if kind == "user":
        closed = [path for path in (sys.base_prefix, sys.prefix, str(root)) if not _others_may_read(Path(path))]
        if os.getuid() != 0:
            return "only root can become another user"
        return f"another user cannot read {', '.join(closed)}" if closed else ""
    command = shutil.which("bwrap")
    if command is None:
        return "there is no bwrap command (Debian and Ubuntu: apt-get install bubblewrap)"
    tried = subprocess.run(
        [command, "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc", "true"],
        capture_output=True,
        text=True,
    )
    return tried.stderr.strip() or ("" if tried.returncode == 0 else f"bwrap ended with code {tried.returncode}")


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles plain values and RankError; refuses every other class."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (RankError.__module__, RankError.__name__):
            return RankError
        raise pickle.UnpicklingError(f"{module}.{name} is not expected from a rank")


class _ControlGroup:
    """A control group that limits memory and processes of a sandbox as a whole."""

    def __init__(self, folders: list[Path]):
        self._folders = folders

    @classmethod
    def create(cls, base: Path = Path("/sys/fs/cgroup")) -> "_ControlGroup | None":
        """Create one below the groups of this process; None where that is not permitted."""
        name, folders = f"minidist-{os.getpid()}-{time.monotonic_ns()}", []
        limits = {
            "memory": {"memory.limit_in_bytes": _TOTAL_MEMORY_BYTES},
            "pids": {"pids.max": PROCESSES},
            "": {"memory.max": _TOTAL_MEMORY_BYTES, "pids.max": PROCESSES},
        }
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controller, path = line.split(":", 2)
            folder = base / controller / path.lstrip("/") / name
            if controller not in limits or (not controller and not (base / "cgroup.controllers").exists()):
                continue
            try:
                folder.mkdir()
                folders.append(folder)
                for file, value in limits[controller].items():
                    (folder / file).write_text(str(value))
            except OSError:
                cls(folders).remove()
                return None
        return cls(folders) if folders else None

    def enter(self) -> None:
        """Move this process into the group."""
        for folder in self._folders:
            (folder / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        """Remove the group, whose processes have ended."""
        end_s = time.monotonic() + _END_S
        for folder in self._folders:
            while folder.exists() and time.monotonic() < end_s:
                try:
                    folder.rmdir()
                except OSError:  # a process has not been removed yet
                    time.sleep(0.01)


def _reserve_uid() -> tuple[socket.socket, int]:
    """Return a user id that no account and no other sandbox has, and the lock that keeps it."""
    for uid in range(_FIRST_UID, _FIRST_UID + _UIDS):
        with contextlib.suppress(KeyError):
            pwd.getpwuid(uid)
            continue
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0minidist-sandbox-{uid}")
        except OSError:
            lock.close()
            continue
        if not _processes_of(uid):
            return lock, uid
        lock.close()
    raise UserError(f"all user ids from {_FIRST_UID} to {_FIRST_UID + _UIDS - 1} are in use")


def _kill_user(uid: int) -> None:
    """Kill all processes of a user of a sandbox."""
    end_s = time.monotonic() + _END_S
    while _processes_of(uid) and time.monotonic() < end_s:
        for pid in _processes_of(uid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)  # so that none forks while the others are killed
        for pid in _processes_of(uid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _delete_files_of(uid: int, folder: str) -> None:
    """Delete the files and folders in `folder` that belong to a user."""
    with contextlib.suppress(FileNotFoundError):
        for entry in list(os.scandir(folder)):
            if entry.stat(follow_symlinks=False).st_uid == uid:
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)


def _processes_of(uid: int) -> list[int]:
    """List the processes of a user that have not ended."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            text = Path("/proc", name, "status").read_text()
            fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
            if fields["Uid"].split()[0] == str(uid) and fields["State"].split()[0] not in "ZX":
                found.append(int(name))
    return found


def _child_pids(pid: int) -> list[int]:
    """Return the process ids of the children of a process; [] after its end."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _inner_pid(pid: int) -> int:
    """Return the id that a process has in its innermost namespace; 0 if unknown."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return 0


def _read_command_line(pid: int) -> str:
    """Return the start of a process's command line; its id if that is unknown."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:60] or str(pid)
    except OSError:
        return str(pid)


def _is_below(path: str, folder: str) -> bool:
    """Return whether a path is `folder` or lies below it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _others_may_read(path: Path) -> bool:
    """Return whether users without other rights may list a folder."""
    return path.exists() and all(
        folder.stat().st_mode & needed == needed
        for folder, needed in ((path, 0o5), *((parent, 0o1) for parent in path.resolve().parents))
    )
