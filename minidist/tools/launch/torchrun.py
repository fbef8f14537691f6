"""Ranks started by torchrun, which passes each its rank and world size in environment variables."""

import atexit
import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from minidist.errors import RunError, UserError
from minidist.tools.launch.attempt import OWN_STORE_HINT, agree_on_attempt, check_same_world_size
from minidist.tools.launch.environment import rank_and_world, read_integer
from minidist.tools.launch.loopback import check_loopback
from minidist.tools.launch.parent_death import die_with_parent
from minidist.tools.launch.threads import threads_per_rank

if TYPE_CHECKING:
    from minidist.comm.world import World

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOOPBACK_ADDRESSES = ("localhost", "127.0.0.1", "::1")
_FIRST_RANK_REPORT_S = 5.0
_AGENT_SIGTERM_S = 30.0
_AGENT_STORE_S = 60.0
_RETRY_S = 0.05


def is_under_torchrun() -> bool:
    """Return whether torchrun, or a launcher that sets the same variables, started this process."""
    return all(name in os.environ for name in _TORCHRUN_VARIABLES)


def read_world_size() -> int:
    """Return the number of ranks of the job, on all machines."""
    return rank_and_world(os.environ).size


def read_local_world_size() -> int:
    """Return the number of ranks on this machine."""
    return rank_and_world(os.environ).local_size


def is_restarted() -> bool:
    """Return whether torchrun has restarted the ranks, as it does with all ranks after one has failed."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def read_rendezvous_port() -> int:
    """Return MASTER_PORT, the port of the rendezvous. Raises UserError if it is 0 (`--master-port 0`) or above 65535.

    With port 0 torchrun's own store takes a free port, but the ranks get the number 0 and would wait forever.
    """
    port = read_integer(os.environ, "MASTER_PORT")
    if port == 0:
        raise UserError(
            f"MASTER_PORT is 0, so the {read_world_size()} ranks cannot find each other: start torchrun with "
            "--standalone, which takes a free port, or with --master-port and a number from 1024 to 65535."
        )
    if port > 65535:
        raise UserError(f"MASTER_PORT is {port}; ports are numbers up to 65535. Give all ranks the port of rank 0.")
    return port


def end_rank(code: int) -> NoReturn:
    """End this process with exit code `code`: at once if the rank failed under torchrun, else by `sys.exit`.

    The interpreter's clean-up takes seconds, in which C++ destructors wait for the other ranks, and torchrun waits too.
    So a failed rank runs only its exit handlers.
    """
    if code and is_under_torchrun():
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def read_job_name() -> str | None:
    """Return the job's name: torchrun's `--rdzv-id`, or the random name that `--standalone` sets; None if unset."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if name == "none" else name


class _SigtermRecorder:
    """Signal handler that only records SIGTERM; installed under torchrun until the rendezvous.

    torchrun sends SIGTERM to all ranks as soon as one has ended. If all ranks reject the same option, rank 0 must still
    be able to print the message.
    """

    def __init__(self):
        self.is_received = False

    def __call__(self, *_) -> None:
        self.is_received = True


def defer_sigterm() -> None:
    """Under torchrun, record SIGTERM instead of ending this process, until `torchrun_world` restores the default.

    torchrun sends SIGTERM to all ranks as soon as one has ended. If all ranks reject the same option, rank 0 must still
    be able to print the message.
    """
    if is_under_torchrun():
        signal.signal(signal.SIGTERM, _SigtermRecorder())


def wait_for_end_of_rank_0() -> bool:
    """Wait some seconds for rank 0, which may report the same error as this rank; return whether rank 0 has ended.

    torchrun sends SIGTERM to the other ranks when rank 0 ends. So this works only after `defer_sigterm`; otherwise it
    returns False at once.
    """
    handler = signal.getsignal(signal.SIGTERM)
    has_agent = "TORCHELASTIC_RUN_ID" in os.environ  # which certainly sends it, but rank 0 may start much later
    end_s = time.monotonic() + (_AGENT_SIGTERM_S if has_agent else _FIRST_RANK_REPORT_S)
    while isinstance(handler, _SigtermRecorder) and not handler.is_received and time.monotonic() < end_s:
        time.sleep(0.02)
    return isinstance(handler, _SigtermRecorder) and handler.is_received


def report_to_torchrun(message: str) -> None:
    """Write an error message to the file that torchrun reads to report a failed rank; do nothing if it set no file.

    torch's decorator `torch.distributed.elastic.multiprocessing.errors.record` does so for uncaught exceptions.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        error = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": error}))


def was_reported_before(message: str) -> bool:
    """Return whether this rank reported the same error message before torchrun restarted the ranks.

    torchrun keeps the file of each attempt, as `.../attempt_0/0/error.json`.
    """
    file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    for earlier in file.parents[2].glob(f"attempt_*/*/{file.name}") if len(file.parents) > 3 else ():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if json.loads(earlier.read_text())["message"]["message"] == message:
                return True
    return False


def is_first_rank() -> bool:
    """Return whether this process prints the messages of the job: it is rank 0, or torchrun did not start it."""
    return not is_under_torchrun() or read_rank_text() == "0"


def read_rank_text() -> str:
    """Return the environment variable RANK as text, unchecked: it may not be a number."""
    return os.environ["RANK"]


@contextlib.contextmanager
def torchrun_world(
    device: str = "auto", backend: str | None = "auto", timeout_s: float = 1800.0, hang_limit_s: float | None = None
) -> Iterator["World"]:
    """Return a context manager that connects this rank, started by torchrun, with the others; its value is the world.

    At its exit the ranks wait for each other. device, backend, hang_limit_s: as for `RankServer.start`. timeout_s: the
    time limit of each operation of torch.distributed, in seconds. Raises UserError if the rank's environment variables
    are wrong, the port is in use or the device is not available; RunError if the ranks cannot connect.
    """
    # Imported here, so that `is_under_torchrun` does not import torch.
    import torch
    import torch.distributed as dist

    from minidist.comm.world import World, connect_ranks
    from minidist.tools.deadlock.status_page import StatusPage
    from minidist.tools.deadlock.watchdog import Watchdog
    from minidist.tools.launch.device import choose_backend, choose_device, prefer_gloo_loopback

    faulthandler.enable()  # torchrun itself reports only the signal of a crash
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())  # torchrun's ranks would outlive it
        # Only torchrun sends it, to ranks that lead sessions of their own: when it ends, even if `nohup` started it.
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, _SigtermRecorder):
        if handler.is_received:
            raise SystemExit(128 + signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    rank, size, local_rank, local_size, node_rank = rank_and_world(os.environ)
    torch.set_num_threads(threads_per_rank(local_size, _user_environ()))
    chosen = choose_device(device, local_rank, local_size)
    backend_name = choose_backend(backend, chosen, device, size)
    world = World(rank, size, local_rank, local_size, chosen, backend_name, StatusPage(), node_rank)
    address, port = os.environ["MASTER_ADDR"], read_rendezvous_port()
    if backend_name is None:
        if _has_agent_store():
            world.store = dist.PrefixStore("minidist", dist.TCPStore(address, port, is_master=False))
        yield world
        return
    if address in _LOOPBACK_ADDRESSES:
        check_loopback(size)
    if local_size == size and address in _LOOPBACK_ADDRESSES:
        prefer_gloo_loopback()
    try:
        store = _open_store(rank, size, address, port, timeout_s)
        hint = OWN_STORE_HINT
        if not _has_agent_store():
            hint = f"All ranks need MASTER_ADDR {address}, an address of the machine of rank 0, and MASTER_PORT {port}."
            check_same_world_size(store, rank, size, timeout_s)
        attempt = agree_on_attempt(store, rank, size, timeout_s, hint)
        connect_ranks(backend_name, dist.PrefixStore(attempt, store), rank, size, chosen, timeout_s)
        status_store = _connect(rank, address, port, timeout_s)
    except dist.DistError as error:
        raise RunError(
            f"rank {rank} could not form a group with the other {size - 1} ranks through {address}, port {port}: one "
            f"of them has ended, and its own message says why ({str(error).splitlines()[0]})."
        ) from None
    world.store = dist.PrefixStore("minidist", status_store)
    watchdog = Watchdog(
        rank,
        size,
        world.status,
        dist.PrefixStore(attempt, world.store),
        node=node_rank,
        timeout_s=timeout_s,
        hang_limit_s=hang_limit_s,
    )
    world.status.on_resume()
    try:
        yield world
    except BaseException:
        if isinstance(handler, _SigtermRecorder):
            signal.signal(signal.SIGTERM, handler)
        world.status.record_end("failed")
        watchdog.stop()
        _keep_groups_until_exit()
        raise
    world.status.record_end("returned")
    watchdog.wait_until_all_ranks_end()
    dist.destroy_process_group()


def _has_agent_store() -> bool:
    """Return whether torchrun's agent on the first node serves the store; otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _keep_groups_until_exit() -> None:
    """Keep the process groups of a failed rank from being destroyed when the interpreter exits.

    The destructor of a gloo group waits for operations in flight, which need the other ranks: the failed rank would not
    end, and torchrun would wait for it instead of ending the others.
    """
    import torch.distributed as dist

    for group in dist.distributed_c10d._world.pg_map:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _open_store(rank: int, size: int, address: str, port: int, timeout_s: float):
    """Return torch's rendezvous store: that of torchrun's agent, else one that rank 0 serves."""
    from torch.distributed import DistNetworkError, TCPStore
    from torch.distributed.rendezvous import rendezvous

    limit = timedelta(seconds=timeout_s)
    if _has_agent_store():  # it is there before its ranks are
        _wait_for_server(address, port, min(timeout_s, _AGENT_STORE_S), OWN_STORE_HINT)
        store, _, _ = next(iter(rendezvous("env://", rank, size, timeout=limit)))
        store.set_timeout(limit)
        return store
    if rank > 0:
        _wait_for_server(address, port, timeout_s, "Give all ranks the address and port of rank 0, and start it.")
        return _connect(rank, address, port, timeout_s)
    try:
        return TCPStore("localhost", port, size, True, limit, wait_for_workers=False, multi_tenant=True)
    except DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise UserError(
            f"port {port} of {address}, the rendezvous of the {size} ranks, is in use by another program, or by "
            "another process with RANK 0: pass another --master-port to torchrun, or --standalone, which takes a free "
            "port; and give each process a RANK of its own."
        ) from None


def _connect(rank: int, address: str, port: int, timeout_s: float):
    """Return a new connection to the store at this address. Rank 0 may have another name for its own machine."""
    from torch.distributed import TCPStore

    host = "localhost" if rank == 0 and not _has_agent_store() else address
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def _wait_for_server(address: str, port: int, timeout_s: float, hint: str) -> None:
    """Wait until a program listens at this address; UserError after `timeout_s`, or if the address is unknown.

    Torch's own attempt to connect would print C++ stack traces instead.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((address, port), timeout=max(1.0, end_s - time.monotonic())).close()
            return
        except OSError as error:
            is_unknown = isinstance(error, socket.gaierror)
            if is_unknown or time.monotonic() > end_s:
                after = "" if is_unknown else f" within {timeout_s:g} s"
                raise UserError(
                    f"nobody listens at MASTER_ADDR {address}, MASTER_PORT {port}{after}: "
                    f"{error.strerror or error}. {hint}"
                ) from None
        time.sleep(_RETRY_S)


def _user_environ() -> Mapping[str, str]:
    """Return the environment without the OMP_NUM_THREADS=1 that torchrun sets if the user set none.

    On Linux, /proc shows whether torchrun itself was started with the variable.
    """
    environ = dict(os.environ)
    with contextlib.suppress(OSError):
        launcher = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        if "TORCHELASTIC_RUN_ID" in environ and not any(entry.startswith(b"OMP_NUM_THREADS=") for entry in launcher):
            environ.pop("OMP_NUM_THREADS", None)
    return environ
