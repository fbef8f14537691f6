"""The process of one rank, from the fork to its exit."""

import atexit
import contextlib
import faulthandler
import mmap
import os
import pickle
import select
import signal
import socket
import sys
import sysconfig
import threading
import traceback

from minidist.errors import RunError, UserError
from minidist.tools.launch.failure import RankError
from minidist.tools.launch.function_reference import resolve_function
from minidist.tools.launch.parent_death import die_with_parent
from minidist.tools.launch.protocol import receive_object, send_object
from minidist.tools.launch.threads import threads_per_rank
from minidist.tools.standard_streams import open_dropping_stream

_LAUNCH_FOLDER = os.path.dirname(os.path.abspath(__file__))
_STDLIB = sysconfig.get_path("stdlib")


def main(server: int, control_fd: int, stack_fd: int, status_fd: int, listen_fd: int = -1) -> int:
    """Run a rank process: receive the function from the control socket, run it, send the result; return the exit code.

    server: process id of the rank server. control_fd: socket to the client. stack_fd: pipe for dumps of the Python
    stack. status_fd: shared memory with the status pages of all ranks. listen_fd: on rank 0, a listening socket on
    which it serves the store.
    """
    faulthandler.enable(file=stack_fd)  # after SIGSEGV, SIGABRT, SIGBUS, SIGFPE or SIGILL
    faulthandler.register(signal.SIGUSR1, file=stack_fd, all_threads=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    control = socket.socket(fileno=control_fd)
    _end_with_server_or_client(server, control)
    try:
        job = receive_object(control)
        _adopt_client_environment(job)
        kind, payload = _run(job, status_fd, listen_fd, control)
        # The result exists: while this rank waits for the others, only SIGKILL ends it.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        _flush_streams()
        send_object(control, (kind, payload))
        # The process, its connections and the store live on until every rank has ended: peers that still wait for this
        # one see a rank that returned, not a broken connection.
        receive_object(control)
        if kind == "value" and job["clean_exit"]:
            _exit_cleanly()
    except (EOFError, ConnectionError):
        return 1
    return 0 if kind == "value" else 1


def _end_with_server_or_client(server: int, control: socket.socket) -> None:
    """Kill this process when its server or its client ends, however they end."""
    with contextlib.suppress(PermissionError):  # a spawned rank leads its group already
        os.setpgid(0, 0)
    die_with_parent(server)

    def watch():
        poll = select.poll()
        poll.register(control, 0)  # reports only the hang-up, no data
        while not poll.poll(1000):
            if os.getppid() != server:
                break
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _adopt_client_environment(job: dict) -> None:
    """Adopt the client's environment, folder, arguments and import path; reopen stdout and stderr."""
    os.environ.clear()
    os.environ.update(job["environ"])
    with contextlib.suppress(OSError):
        os.chdir(job["cwd"])
    sys.path[:], sys.argv[:] = job["path"], job["argv"]
    sys.stdout, sys.stderr = open_dropping_stream(1), open_dropping_stream(2)


def _run(job: dict, status_fd: int, listen_fd: int, control: socket.socket) -> tuple[str, object]:
    """Run the function; return ("value", pickled result), ("error", RankError) or ("exit", code)."""
    # Imported only now, when a spawned rank can already report errors.
    from minidist.tools.deadlock.status_page import PAGE_BYTES, StatusPage

    page = mmap.mmap(status_fd, PAGE_BYTES * job["size"])
    status = StatusPage(memoryview(page)[PAGE_BYTES * job["rank"] : PAGE_BYTES * (job["rank"] + 1)])
    try:
        world = _make_world(job, status, listen_fd)
        function = resolve_function(job["function"])
        args, kwargs = pickle.loads(job["arguments"])
        status.on_resume()
        if job["live"]:
            from minidist.tools.launch.rank_worker import RankWorker

            args = (RankWorker(world, control), *args)
        value = function(world, *args, **kwargs)
        status.record_end("returned")
        return "value", _pickle_result(value, job["function"].qualname)
    except SystemExit as end:
        if end.code in (None, 0):
            status.record_end("returned")
            return "value", pickle.dumps(None)
        status.record_end("failed")
        if not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        return "exit", end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        status.record_end("failed")
        return "error", _make_rank_error(error)


def _make_world(job: dict, status, listen_fd: int):
    """Choose device and backend, connect to the other ranks and return this rank's world."""
    import torch

    from minidist.comm.world import World, connect_ranks
    from minidist.tools.launch.device import choose_backend, choose_device, prefer_gloo_loopback

    rank, size = job["rank"], job["size"]
    torch.set_num_threads(job["threads"] or threads_per_rank(size, job["environ"]))
    device = choose_device(job["device"], rank, size)
    backend = choose_backend(job["backend"], device, job["device"], size)
    replaces_ranks = job["replaces_ranks"]
    needs_store = backend is not None or size > 1 or job["live"] or replaces_ranks
    store = _open_store(job, listen_fd) if needs_store else None
    job["store"] = store  # kept until the process ends: other ranks may still use it when this one has returned
    if backend is not None:
        prefer_gloo_loopback()
    if backend is not None and not replaces_ranks:
        connect_ranks(backend, store, rank, size, device, job["timeout_s"])
    member = job["member"] if replaces_ranks else None
    return World(rank, size, rank, size, device, backend, status, store=store, member=member)


def _open_store(job: dict, listen_fd: int):
    """Open the store of the ranks, which rank 0 serves, or the launcher if dead ranks are replaced.

    Rank 0 serves it on a socket that already listens, so no other program can take the port.
    """
    from torch.distributed import TCPStore

    is_first = job["rank"] == 0 and not job["replaces_ranks"]
    listen = {"master_listen_fd": listen_fd} if is_first else {}
    return TCPStore(
        "127.0.0.1", job["port"], job["size"], is_master=is_first, wait_for_workers=False, use_libuv=True, **listen
    )


def _pickle_result(value: object, name: str) -> bytes:
    """Pickle the return value of the function `name`. Raises TypeError if that is impossible."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(
            f"the result of {name} is a {type(value).__name__}, which cannot be pickled and sent back: {error}"
        ) from None


def _make_rank_error(error: BaseException) -> RankError:
    """Describe an exception for the client, with the innermost line of the user's code."""
    internal = (_LAUNCH_FOLDER, "<frozen")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(internal)]
    import torch

    import minidist

    own = os.path.dirname(os.path.abspath(minidist.__file__)) + os.sep
    libraries = (os.path.dirname(os.path.dirname(os.path.abspath(torch.__file__))) + os.sep, _STDLIB + os.sep)
    frames_outside = [f for f in frames if not f.filename.startswith(libraries) or f.filename.startswith(own)]
    user_frames = [f for f in frames_outside if not f.filename.startswith(own)]
    if not user_frames and not isinstance(error, UserError | RunError):  # their message says all
        user_frames = frames_outside or frames
    where = f"{user_frames[-1].filename}:{user_frames[-1].lineno} in {user_frames[-1].name}" if user_frames else ""
    head = "Traceback (most recent call last):\n" if frames else ""
    text = head + "".join(traceback.format_list(frames)) + "".join(traceback.format_exception_only(error))
    is_connection_error = isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)
    )
    is_connection_error = is_connection_error or type(error).__name__ == "CommError"
    return RankError(
        type(error).__name__, str(error), where, text, getattr(error, "exit_code", None), is_connection_error
    )


def _flush_streams() -> None:
    """Flush stdout and stderr; ignore errors."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _exit_cleanly() -> None:
    """Destroy the process group and run the exit handlers."""
    import torch.distributed as dist

    # nccl destroys a communicator together with all ranks, and rank 0 ends last: the end of the process does it too.
    if dist.is_initialized() and dist.get_backend() != "nccl":
        dist.destroy_process_group()
    atexit._run_exitfuncs()
    _flush_streams()
