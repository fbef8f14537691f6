"""The client of the rank server: start the server once, then run functions on fresh ranks any number of times.

with RankServer() as server:
    result = server.run(function, 4, ("an argument",))     # function(world, "an argument") on four ranks
    result.values                                           # the return values, by rank
"""

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minidist.errors import RunError, UserError
from minidist.tools.launch.function_reference import check_no_import_by_a_rank, make_function_reference
from minidist.tools.launch.loopback import check_loopback
from minidist.tools.launch.protocol import MessageSocket

if TYPE_CHECKING:
    from minidist.tools.launch.job import Job, Replacement, Result

# torch's profiler, which reports allocations to the memory tracker, logs lines of its own from torch 2.13 on.
_QUIET_PROFILER_ENV = {"KINETO_LOG_LEVEL": "99"}
_START_S = 120.0
_CLOSE_S = 5.0
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


class RankServer:
    """A server process with torch imported, which forks ranks in milliseconds. A context manager. Not thread-safe.

    env: environment variables set in the server, before it imports torch, and in the ranks.
    method: "fork" or "spawn". "spawn" starts new interpreters, which takes seconds instead of milliseconds; CUDA and
    macOS need it. None: "fork" on Linux, else "spawn". A job on CUDA always uses "spawn".
    preload: modules that the server imports for the ranks. torch's optimizers import torch._dynamo, which would take
    each rank a second.
    Ranks use preloaded modules, torch and minidist.comm as they were when the server started, and load everything else
    when they start. The constructor does not wait for the server; the first job does.
    """

    def __init__(
        self,
        *,
        env: Mapping[str, str] | None = None,
        method: str | None = None,
        preload: Sequence[str] = ("torch._dynamo",),
    ):
        if method not in (None, "fork", "spawn"):
            raise UserError(f"method {method!r} is not known; possible are 'fork' and 'spawn'")
        check_no_import_by_a_rank()
        self.env = dict(env or {})
        self.method = method or ("fork" if sys.platform == "linux" else "spawn")
        self._preload = tuple(preload)
        self._jobs: dict[int, Job] = {}
        self._next_job = 0
        self._spawner: RankServer | None = None
        self._start_server()

    def __enter__(self) -> "RankServer":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self._process.pid

    def run(self, function: Callable, ranks: int, args: Sequence = (), **options) -> "Result":
        """Run `function(world, *args)` on `ranks` new ranks; block until they have ended; return their results.

        options: as for `start`. Raises RankFailure when a rank raised, died, deadlocked or missed the deadline; but if
        the only cause is a UserError or RunError that ranks raised, raises that error.
        """
        return self.start(function, ranks, args, **options).wait()

    def start(
        self,
        function: Callable,
        ranks: int,
        args: Sequence = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        backend: str | None = "auto",
        device: str = "cpu",
        capture: bool = True,
        deadline_s: float | None = None,
        timeout_s: float = 1800.0,
        hang_limit_s: float | None = None,
        threads: int | None = None,
        live: bool = False,
        clean_exit: bool = True,
        replacement: "Replacement | None" = None,
    ) -> "Job":
        """Start `function(world, *args, **kwargs)` on `ranks` new ranks of this machine; return the job at once.

        function: any function at the top level of a file. args, kwargs: equal for all ranks; they are pickled.
        backend: the backend of the default process group: "auto" (none for one rank, nccl if each rank has its own GPU,
        else shm), a name, or None for no process group.
        device: "cpu", "cuda" (one GPU per rank), "cuda:0" (one GPU for all ranks), "auto".
        capture: collect the output of the ranks in `Result.output`; otherwise they write to this process's stdout and
        stderr.
        deadline_s: kill the job after that many seconds; None: never. timeout_s: the time limit of each operation of
        torch.distributed, in seconds.
        hang_limit_s: kill a rank that other ranks have awaited for that many seconds while it runs or is stopped; None:
        nine tenths of timeout_s.
        threads: the number of torch's threads per rank; None: `threads_per_rank`.
        live: return a `LiveJob`, whose ranks answer requests until they are killed; the function then gets a
        `RankWorker`, which answers them, as its second argument.
        clean_exit: whether ranks that have returned destroy their process group and run exit handlers before they end.
        replacement: replace ranks that die, instead of ending the job. The function then gets a world without process
        group, and joins the other ranks by `tools.recovery.membership.Membership`.
        """
        if not isinstance(ranks, int) or ranks < 1:
            raise UserError(f"the number of ranks is {ranks!r}; give a whole number of at least 1")
        if device != "cpu" and self.method == "fork":
            return self._get_spawning_server().start(
                function, ranks, args, kwargs, backend=backend, device=device, capture=capture,
                deadline_s=deadline_s, timeout_s=timeout_s, hang_limit_s=hang_limit_s,
                threads=threads, live=live, clean_exit=clean_exit, replacement=replacement,
            )  # fmt: skip
        if ranks > 1:
            self.check_network(ranks)
        bootstrap = {
            "function": make_function_reference(function),
            "arguments": _pickle_arguments(function, (tuple(args), dict(kwargs or {}))),
            "backend": backend,
            "device": device,
            "timeout_s": timeout_s,
            "threads": threads,
            "live": live,
            "clean_exit": clean_exit,
            "replaces_ranks": replacement is not None,
            "environ": {**_QUIET_PROFILER_ENV, **self._inherited_environ(), **self.env},
            "cwd": os.getcwd(),
            "path": self._import_path(),
            "argv": list(sys.argv),
        }
        from minidist.tools.launch.job import Job

        self.ensure_ready()
        self._next_job += 1
        if live:
            from minidist.tools.launch.live_job import LiveJob as Job
        from minidist.tools.deadlock.hang import default_hang_limit_s

        limit_s = default_hang_limit_s(timeout_s) if hang_limit_s is None else hang_limit_s
        return Job(self, self._next_job, ranks, bootstrap, capture, deadline_s, limit_s, replacement)

    def close(self) -> None:
        """Kill all ranks and the server process, and wait until they have ended."""
        if self._spawner is not None:
            self._spawner.close()
        for job in list(self._jobs.values()):
            job.kill()
        self._connection.socket.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start_server(self) -> None:
        """Start a server process; its end of the connection is inherited."""
        own_end, server_end = socket.socketpair()
        code = (
            f"import sys; sys.path.insert(0, {_ROOT!r}); from minidist.tools.launch.server import main; "
            f"main({server_end.fileno()}, {self.method!r}, {self._preload!r})"
        )
        # numpy's OpenBLAS starts its threads on import; a process that forks must have none.
        thread_env = {"OPENBLAS_NUM_THREADS": "1"} if self.method == "fork" else {}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            env={**os.environ, **thread_env, **self.env},
            stdin=subprocess.DEVNULL,
            pass_fds=(server_end.fileno(),),
            start_new_session=True,  # Ctrl-C at a terminal reaches only the client, which handles it
        )
        server_end.close()
        self._connect(own_end)

    def _connect(self, own_end: socket.socket) -> None:
        """Make the socket `own_end` the connection to a new server process."""
        self._connection, self._is_ready, self._has_ended = MessageSocket(own_end), False, False

    # Five steps that a subclass changes if it does not trust the code that runs on the ranks, or runs them elsewhere.

    load_message = staticmethod(pickle.loads)  # unpickles messages and results of ranks

    def _inherited_environ(self) -> Mapping[str, str]:
        """Return the environment variables of this process that ranks inherit."""
        return os.environ

    def _import_path(self) -> list[str]:
        """Return the `sys.path` of the ranks."""
        return list(sys.path)

    def create_listening_socket(self, backlog: int) -> socket.socket:
        """Return a socket that listens on a free port of 127.0.0.1, as the ranks see that address."""
        return socket.create_server(("127.0.0.1", 0), backlog=backlog)

    def check_network(self, ranks: int) -> None:
        """Raise UserError if `ranks` ranks cannot reach each other."""
        check_loopback(ranks)

    def ensure_ready(self) -> None:
        """Block until the server can start ranks; restart it if it has died. Raises RunError if it does not start."""
        if self._has_ended or self._process.poll() is not None:
            self._connection.socket.close()
            self._process.kill()
            self._process.wait()
            self._start_server()
        end_s = time.monotonic() + _START_S
        while not self._is_ready:
            if not select.select([self._connection.socket], [], [], max(0.0, end_s - time.monotonic()))[0]:
                raise RunError(
                    f"the rank server (process {self.pid}) was not ready after {_START_S:.0f} s: is the machine busy?"
                )
            if not self._receive():
                raise RunError(
                    f"the rank server ended with code {self._process.wait()} while it started; see its output above"
                )

    def _receive(self) -> bool:
        """Handle the server's messages; return False when it has ended."""
        messages = self._connection.receive()
        self._has_ended = messages is None  # its sockets close before the process can be waited for
        for message, _ in messages or []:
            if message["event"] == "ready":
                self._is_ready = True
            elif message["job"] in self._jobs:
                self._jobs[message["job"]]._on_rank_event(message)
        return messages is not None

    def _send(self, message: dict, fds: tuple[int, ...] = ()) -> None:
        """Send a message to the server. Does nothing if the server has ended, which the next read notices."""
        with contextlib.suppress(OSError):  # the next read notices that the server has ended
            self._connection.send(message, fds)

    def _get_spawning_server(self) -> "RankServer":
        """Return a second server, with method "spawn", for jobs on CUDA; the first call creates it."""
        if self._spawner is None:
            self._spawner = RankServer(env=self.env, method="spawn")
        return self._spawner


def launch(function: Callable, ranks: int, args: Sequence = (), *, env=None, method=None, **options) -> "Result":
    """Run `function(world, *args)` on `ranks` new ranks, with a `RankServer` for this call alone; return the results.

    env, method: as for `RankServer`. options: as for `RankServer.start`. Raises the same errors as `RankServer.run`.
    """
    with RankServer(env=env, method=method) as server:
        return server.run(function, ranks, args, **options)


def _pickle_arguments(function: Callable, arguments: tuple) -> bytes:
    """Pickle the arguments of a function. Raises UserError if that is impossible."""
    try:
        return pickle.dumps(arguments, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise UserError(
            f"the arguments of {function.__qualname__} cannot be sent to ranks, because they cannot be pickled: {error}"
        ) from None


def forward_signals(job: "Job", *signals: signal.Signals):
    """Return a context manager inside which these signals go to all ranks of the job; this process ignores them."""
    return _SignalForwarding(job, signals)


class _SignalForwarding:
    """Context manager that forwards signals of this process to the ranks of a job."""

    def __init__(self, job: "Job", signals: Sequence[signal.Signals]):
        self._job, self._signals = job, signals

    def __enter__(self) -> None:
        self._previous_handlers = {number: signal.signal(number, self._forward) for number in self._signals}

    def _forward(self, number: int, _frame) -> None:
        self._job.send_signal(number)

    def __exit__(self, *_) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
