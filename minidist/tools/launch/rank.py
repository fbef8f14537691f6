"""The life of one rank: from the fork to its last message."""

import atexit
import contextlib
import faulthandler
import io
import mmap
import os
import pickle
import select
import signal
import socket
import sys
import threading
import traceback

from minidist.tools.launch.failure import RankError
from minidist.tools.launch.functions import resolve
from minidist.tools.launch.orphans import die_with
from minidist.tools.launch.protocol import receive_object, send_object
from minidist.tools.launch.threads import threads_per_rank

_HERE = os.path.dirname(os.path.abspath(__file__))


def main(server: int, control_fd: int, stack_fd: int, board_fd: int, listen_fd: int = -1) -> int:
    """Run the job that comes in on the control socket; returns the exit code for `os._exit`."""
    faulthandler.register(signal.SIGUSR1, file=stack_fd, all_threads=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    control = socket.socket(fileno=control_fd)
    _die_with(server, control)
    try:
        job = receive_object(control)
        _take_over(job)
        kind, payload = _run(job, board_fd, listen_fd, control)
        for name in ("SIGINT", "SIGTERM"):  # the work is done: only SIGKILL ends the wait for the others
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        _flush()
        send_object(control, (kind, payload))
        # The process, its connections and the store live on until every rank has ended: peers that still wait for this
        # one see a rank that returned, not a broken connection.
        receive_object(control)
        if kind == "value" and job["tidy"]:
            _leave()
    except (EOFError, ConnectionError):
        return 1
    return 0 if kind == "value" else 1


def _die_with(server: int, control: socket.socket) -> None:
    """End this process when its server or its client ends, however they end."""
    with contextlib.suppress(PermissionError):  # a spawned rank leads its group already
        os.setpgid(0, 0)
    die_with(server)

    def watch():
        poll = select.poll()
        poll.register(control, 0)  # hang-up is always reported, data is none of our business
        while not poll.poll(1000):
            if os.getppid() != server:
                break
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _take_over(job: dict) -> None:
    """Make this process look like one the client started: environment, folder, arguments, import path, output."""
    os.environ.clear()
    os.environ.update(job["environ"])
    with contextlib.suppress(OSError):
        os.chdir(job["cwd"])
    sys.path[:], sys.argv[:] = job["path"], job["argv"]
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(fd, "w", closefd=False)
        text = io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", errors="backslashreplace", line_buffering=True)
        setattr(sys, name, text)


def _run(job: dict, board_fd: int, listen_fd: int, control: socket.socket) -> tuple[str, object]:
    """("value", pickled result), ("error", RankError) or ("exit", code)."""
    # Imported here: a spawned rank must first be able to say what goes wrong.
    from minidist.tools.deadlock.status_page import PAGE_BYTES, StatusPage

    page = mmap.mmap(board_fd, PAGE_BYTES * job["size"])
    board = StatusPage(memoryview(page)[PAGE_BYTES * job["rank"] : PAGE_BYTES * (job["rank"] + 1)])
    try:
        world = _join(job, board, listen_fd)
        function = resolve(job["function"])
        args, kwargs = pickle.loads(job["arguments"])
        board.resume()
        if job["live"]:
            from minidist.tools.launch.live_rank import Seat

            args = (Seat(world, control), *args)
        value = function(world, *args, **kwargs)
        board.finish("returned")
        return "value", _pickled(value, job["function"].qualname)
    except SystemExit as end:
        if end.code in (None, 0):
            board.finish("returned")
            return "value", pickle.dumps(None)
        board.finish("failed")
        if not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        return "exit", end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        board.finish("failed")
        return "error", _told(error)


def _join(job: dict, board, listen_fd: int):
    import torch

    from minidist.comm.world import World
    from minidist.tools.launch.device import choose_backend, choose_device, init_group, prefer_loopback

    rank, size = job["rank"], job["size"]
    torch.set_num_threads(job["threads"] or threads_per_rank(size, job["environ"]))
    device = choose_device(job["device"], rank, size)
    backend = choose_backend(job["backend"], device, job["device"], size)
    store = _store(job, listen_fd) if backend is not None or size > 1 or job["live"] else None
    job["store"] = store  # kept to the end of the process: others may still meet when this rank has returned
    if backend is not None:
        prefer_loopback()
        init_group(backend, store, rank, size, device, job["timeout_s"])
    return World(rank, size, rank, size, device, backend, board, store=store)


def _store(job: dict, listen_fd: int):
    """The meeting point. Rank 0 serves it on a socket that listens already: no port to lose, nobody comes too soon."""
    from torch.distributed import TCPStore

    first = job["rank"] == 0
    listen = {"master_listen_fd": listen_fd} if first else {}
    return TCPStore(
        "127.0.0.1", job["port"], job["size"], is_master=first, wait_for_workers=False, use_libuv=True, **listen
    )


def _pickled(value: object, name: str) -> bytes:
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(
            f"the result of {name} is a {type(value).__name__}, which cannot be pickled and so not sent back: {error}"
        ) from None


def _told(error: BaseException) -> RankError:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((_HERE, "<frozen"))]
    import torch

    import minidist

    ours, torchs = (os.path.dirname(os.path.abspath(m.__file__)) + os.sep for m in (minidist, torch))
    own = [f for f in frames if not f.filename.startswith((ours, torchs))]
    own = own or [f for f in frames if not f.filename.startswith(torchs)]
    where = f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""
    head = "Traceback (most recent call last):\n" if frames else ""
    text = head + "".join(traceback.format_list(frames)) + "".join(traceback.format_exception_only(error))
    network = isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)
    )
    network = network or type(error).__name__ == "CommError"
    return RankError(type(error).__name__, str(error), where, text, getattr(error, "exit_code", None), network)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _leave() -> None:
    """Close the process group and do what an interpreter does on its way out."""
    import torch.distributed as dist

    # nccl destroys a communicator together with all ranks, and rank 0 ends last: the end of the process does it too.
    if dist.is_initialized() and dist.get_backend() != "nccl":
        dist.destroy_process_group()
    atexit._run_exitfuncs()
    _flush()
