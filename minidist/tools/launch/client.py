"""The rank server seen from outside: start it once, run functions on fresh ranks as often as you like.

with RankServer() as server:
    result = server.run(function, 4, ("an argument",))     # function(world, "an argument") on four ranks
    result.values                                           # what it returned, by rank
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
from minidist.tools.launch.functions import reference
from minidist.tools.launch.protocol import Line

if TYPE_CHECKING:
    from minidist.tools.launch.job import Job, Result

# torch's profiler, which tells the memory tracker of every allocation, writes lines of its own from 2.13 on.
_QUIET = {"KINETO_LOG_LEVEL": "99"}
_START_S = 120.0
_CLOSE_S = 5.0
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


class RankServer:
    """A clean process with torch loaded that forks ranks in milliseconds; a context manager. For one thread at a time.

    env: environment variables set before torch is imported (`{"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}`), and in the ranks.
    method: "fork"; "spawn" starts new interpreters, seconds instead of milliseconds, which CUDA and macOS need. None:
    fork on Linux, else spawn; a job on CUDA spawns by itself.
    preload: modules the ranks find imported. torch's optimizers import torch._dynamo, one second in every rank.
    Besides, ranks find torch and minidist.comm as they were when the server started, everything else as it is now.
    The constructor does not wait for the process; the first job does.
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
        self.env = dict(env or {})
        self.method = method or ("fork" if sys.platform == "linux" else "spawn")
        self._preload = tuple(preload)
        self._jobs: dict[int, Job] = {}
        self._next_job = 0
        self._spawner: RankServer | None = None
        self._boot()

    def __enter__(self) -> "RankServer":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, function: Callable, ranks: int, args: Sequence = (), **options) -> "Result":
        """`start(...).wait()`: run `function(world, *args)` on every rank and return what the ranks returned.

        Raises RankFailure when a rank raised, died, deadlocked or passed the deadline, and UserError when all that went
        wrong is that ranks raised one and the same UserError.
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
        threads: int | None = None,
        live: bool = False,
        tidy: bool = True,
    ) -> "Job":
        """Start `function(world, *args, **kwargs)` on fresh ranks of this machine.

        function: any function at the top level of a file. args, kwargs: pickled, the same for all ranks.
        backend: of the default process group: "auto" (none for one rank, nccl on GPUs of their own, else shm), a name,
        or None.
        device: "cpu", "cuda" (a GPU each), "cuda:0" (one GPU for all), "auto".
        capture: keep what ranks print for `Result.output`; else they write to our own stdout and stderr.
        deadline_s: kill the job after that many seconds; never when None. timeout_s: torch's own for one operation.
        threads: per rank; by default as `threads_per_rank` says.
        live: the function takes a `Seat` after the world and answers what a `LiveJob` asks.
        tidy: ranks that have returned close what they hold before they end; False when nobody would miss that.
        """
        if not isinstance(ranks, int) or ranks < 1:
            raise UserError(f"{ranks!r} ranks were asked for; ask for a whole number of at least 1")
        if device != "cpu" and self.method == "fork":
            return self._spawning().start(
                function, ranks, args, kwargs, backend=backend, device=device, capture=capture,
                deadline_s=deadline_s, timeout_s=timeout_s, threads=threads, live=live, tidy=tidy,
            )  # fmt: skip
        bootstrap = {
            "function": reference(function),
            "arguments": _pickled(function, (tuple(args), dict(kwargs or {}))),
            "backend": backend,
            "device": device,
            "timeout_s": timeout_s,
            "threads": threads,
            "live": live,
            "tidy": tidy,
            "environ": {**_QUIET, **os.environ, **self.env},
            "cwd": os.getcwd(),
            "path": list(sys.path),
            "argv": list(sys.argv),
        }
        # Imported after the server has started: with our package comes torch, which both then load at the same time.
        from minidist.tools.launch.job import Job

        self.wait_until_ready()
        self._next_job += 1
        if live:
            from minidist.tools.launch.live_job import LiveJob as Job
        return Job(self, self._next_job, ranks, bootstrap, capture, deadline_s)

    def close(self) -> None:
        """Kill all ranks and the server."""
        if self._spawner is not None:
            self._spawner.close()
        for job in list(self._jobs.values()):
            job.kill()
        self._line.socket.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _boot(self) -> None:
        ours, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path.insert(0, {_ROOT!r}); from minidist.tools.launch.server import main; "
            f"main({theirs.fileno()}, {self.method!r}, {self._preload!r})"
        )
        # numpy's OpenBLAS starts its threads on import; a process that forks must have none.
        quiet = {"OPENBLAS_NUM_THREADS": "1"} if self.method == "fork" else {}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            env={**os.environ, **quiet, **self.env},
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # Ctrl-C at a terminal reaches the client alone, which decides
        )
        theirs.close()
        self._line, self._ready, self._gone = Line(ours), False, False

    def wait_until_ready(self) -> None:
        """Block until the server can start ranks; replace it when it died. Raises RunError if it does not start."""
        if self._gone or self._process.poll() is not None:
            self._line.socket.close()
            self._process.kill()
            self._process.wait()
            self._boot()
        end_s = time.monotonic() + _START_S
        while not self._ready:
            if not select.select([self._line.socket], [], [], max(0.0, end_s - time.monotonic()))[0]:
                raise RunError(f"the rank server (process {self.pid}) was not ready after {_START_S:.0f} s")
            if not self._receive():
                raise RunError(
                    f"the rank server ended with code {self._process.wait()} while it started; see its output above"
                )

    def _receive(self) -> bool:
        """Take in what the server says; False when it is gone."""
        messages = self._line.receive()
        self._gone = messages is None  # its sockets are closed before its end can be waited for
        for message, _ in messages or []:
            if message["event"] == "ready":
                self._ready = True
            elif message["job"] in self._jobs:
                self._jobs[message["job"]]._event(message)
        return messages is not None

    def _tell(self, message: dict, fds: tuple[int, ...] = ()) -> None:
        with contextlib.suppress(OSError):  # a server that is gone is noticed by the next read
            self._line.send(message, fds)

    def _spawning(self) -> "RankServer":
        if self._spawner is None:
            self._spawner = RankServer(env=self.env, method="spawn")
        return self._spawner


def launch(function: Callable, ranks: int, args: Sequence = (), *, env=None, method=None, **options) -> "Result":
    """Start a rank server, run one job on it (arguments as for `RankServer.run`), close it."""
    with RankServer(env=env, method=method) as server:
        return server.run(function, ranks, args, **options)


def _pickled(function: Callable, arguments: tuple) -> bytes:
    try:
        return pickle.dumps(arguments, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise UserError(
            f"the arguments of {function.__qualname__} cannot be sent to ranks, because they cannot be pickled: {error}"
        ) from None


def forward_signals(job: "Job", *signals: signal.Signals):
    """Within this context the given signals go to the ranks of the job instead of ending this process."""
    return _Forward(job, signals)


class _Forward:
    def __init__(self, job: "Job", signals: Sequence[signal.Signals]):
        self._job, self._signals = job, signals

    def __enter__(self) -> None:
        self._before = {s: signal.signal(s, lambda number, _: self._job.signal(number)) for s in self._signals}

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
