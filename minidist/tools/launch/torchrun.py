"""The same program under torchrun, which starts the ranks and tells each its place in environment variables."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from minidist.errors import UserError
from minidist.tools.launch.environment import rank_and_world, read_integer
from minidist.tools.launch.parent_death import die_with_parent
from minidist.tools.launch.threads import threads_per_rank

if TYPE_CHECKING:
    from minidist.comm.world import World

_GIVEN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOCAL = ("localhost", "127.0.0.1", "::1")
_TELL_S = 5.0


def under_torchrun() -> bool:
    """Whether a launcher has told this process its rank."""
    return all(name in os.environ for name in _GIVEN)


def torchrun_size() -> int:
    """How many ranks the launcher has started."""
    return rank_and_world(os.environ).size


def torchrun_local_size() -> int:
    """How many of them on this machine."""
    return rank_and_world(os.environ).local_size


def meeting_port() -> int:
    """The port where the ranks meet. Raises UserError for port 0, which `--master-port 0` hands on as it is.

    torchrun's own store takes a free port then, but tells the ranks 0, and they would look for it for ever.
    """
    port = read_integer(os.environ, "MASTER_PORT")
    if port == 0:
        raise UserError(
            f"MASTER_PORT is 0, so the {torchrun_size()} ranks cannot find each other: start torchrun with "
            "--standalone, which takes a free port and says which, or give --master-port a number from 1024 to 65535."
        )
    return port


class Held:
    """What SIGTERM does under torchrun until the ranks meet: it is remembered.

    torchrun sends it to all ranks as soon as one has ended. Where all find the same fault in what was asked for, rank
    0, which tells it, must not be cut short.
    """

    def __init__(self):
        self.asked = False

    def __call__(self, *_) -> None:
        self.asked = True


def hold_sigterm() -> None:
    """Begin to hold SIGTERM, under torchrun; `torchrun_world` lets go of it, and holds it again after an error."""
    if under_torchrun():
        signal.signal(signal.SIGTERM, Held())


def let_first_rank_tell() -> bool:
    """Before a rank ends with an error that rank 0 may have as well: wait until rank 0 has ended; whether it has.

    torchrun then sends SIGTERM to the others. Waits for a few seconds at most: rank 0 may have no error.
    """
    held = signal.getsignal(signal.SIGTERM)
    end_s = time.monotonic() + _TELL_S
    while isinstance(held, Held) and not held.asked and time.monotonic() < end_s:
        time.sleep(0.02)
    return isinstance(held, Held) and held.asked


def report_to_torchrun(message: str) -> None:
    """Put the message of an error into torchrun's table of failed ranks, in the file that torchrun names for it.

    torch's own `record` decorator writes such a file for exceptions that nobody catches.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        error = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": error}))


def is_first_rank() -> bool:
    """Whether this process is rank 0, or no rank at all: the one that speaks for all."""
    return not under_torchrun() or own_rank() == "0"


def own_rank() -> str:
    """What the launcher calls this process; no number if it made a mistake, which must be possible to say."""
    return os.environ["RANK"]


@contextlib.contextmanager
def torchrun_world(device: str = "auto", backend: str | None = "auto", timeout_s: float = 1800.0) -> Iterator["World"]:
    """The world of a rank that torchrun started, as a context; at its end ranks wait for each other.

    device, backend: as for `RankServer.start`. timeout_s: the longest one operation may take.
    Raises UserError when the place is not known, the port is taken or the device is not there.
    """
    # Here, so that asking `under_torchrun` costs no import of torch.
    import torch
    import torch.distributed as dist

    from minidist.comm.world import World
    from minidist.tools.deadlock.status_page import StatusPage
    from minidist.tools.deadlock.watchdog import Watchdog
    from minidist.tools.launch.device import choose_backend, choose_device, init_group, prefer_loopback

    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())  # torchrun gives its ranks a session of their own, and no end with its own
    held = signal.getsignal(signal.SIGTERM)
    if isinstance(held, Held):
        if held.asked:
            raise SystemExit(128 + signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    rank, size, local_rank, local_size, node_rank = rank_and_world(os.environ)
    torch.set_num_threads(threads_per_rank(local_size, _own_environ()))
    chosen = choose_device(device, local_rank, local_size)
    talks = choose_backend(backend, chosen, device, size)
    world = World(rank, size, local_rank, local_size, chosen, talks, StatusPage(), node_rank)
    if talks is None:
        yield world
        return
    address, port = os.environ["MASTER_ADDR"], meeting_port()
    if local_size == size and address in _LOCAL:
        prefer_loopback()
    init_group(talks, _store(rank, size, address, port, timeout_s), rank, size, chosen, timeout_s)
    own = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # not the status of an earlier attempt
    watchdog = Watchdog(rank, size, world.status, dist.PrefixStore(f"minidist/{attempt}", own), timeout_s=timeout_s)
    world.status.resume()
    try:
        yield world
    except BaseException:
        if isinstance(held, Held):
            signal.signal(signal.SIGTERM, held)
        world.status.finish("failed")
        watchdog.stop()
        raise
    world.status.finish("returned")
    watchdog.finish()
    dist.destroy_process_group()


def _store(rank: int, size: int, address: str, port: int, timeout_s: float):
    """torch's own meeting point: the agent's store under torchrun, else one that rank 0 serves."""
    from torch.distributed import DistNetworkError
    from torch.distributed.rendezvous import rendezvous

    try:
        store, _, _ = next(iter(rendezvous("env://", rank, size, timeout=timedelta(seconds=timeout_s))))
    except DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise UserError(
            f"port {port} of {address}, where the {size} ranks are to meet, is in use by another program: "
            f"pass another --master-port to torchrun, or --standalone, which takes a free one"
        ) from None
    return store


def _own_environ() -> Mapping[str, str]:
    """The environment without the OMP_NUM_THREADS=1 that torchrun adds when the person set none.

    What the person set stands in the environment torchrun itself was started with, which Linux shows.
    """
    environ = dict(os.environ)
    with contextlib.suppress(OSError):
        launcher = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        if "TORCHELASTIC_RUN_ID" in environ and not any(entry.startswith(b"OMP_NUM_THREADS=") for entry in launcher):
            environ.pop("OMP_NUM_THREADS", None)
    return environ
