"""Ranks started by torchrun, which passes each its rank and world size in environment variables."""

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
    """Whether torchrun, or a compatible launcher, started this process."""
    return all(name in os.environ for name in _GIVEN)


def torchrun_size() -> int:
    """Return the world size."""
    return rank_and_world(os.environ).size


def torchrun_local_size() -> int:
    """Return the number of ranks on this machine."""
    return rank_and_world(os.environ).local_size


def meeting_port() -> int:
    """Return the rendezvous port. Raises UserError for port 0 (`--master-port 0`).

    torchrun's own store then takes a free port but passes 0 to the ranks, which would wait for it forever.
    """
    port = read_integer(os.environ, "MASTER_PORT")
    if port == 0:
        raise UserError(
            f"MASTER_PORT is 0, so the {torchrun_size()} ranks cannot find each other: start torchrun with "
            "--standalone, which takes a free port and says which, or give --master-port a number from 1024 to 65535."
        )
    return port


class Held:
    """Signal handler that records SIGTERM until the rendezvous, under torchrun.

    torchrun sends SIGTERM to all ranks as soon as one has ended. If all refuse the same wrong option, rank 0 must still
    be able to print the message.
    """

    def __init__(self):
        self.asked = False

    def __call__(self, *_) -> None:
        self.asked = True


def hold_sigterm() -> None:
    """Defer SIGTERM if under torchrun; `torchrun_world` restores it, and defers it again after an error."""
    if under_torchrun():
        signal.signal(signal.SIGTERM, Held())


def let_first_rank_tell() -> bool:
    """Wait a few seconds for rank 0 to report an error that it may share with this rank; return whether it has ended.

    torchrun sends SIGTERM to the other ranks when rank 0 ends.
    """
    held = signal.getsignal(signal.SIGTERM)
    end_s = time.monotonic() + _TELL_S
    while isinstance(held, Held) and not held.asked and time.monotonic() < end_s:
        time.sleep(0.02)
    return isinstance(held, Held) and held.asked


def report_to_torchrun(message: str) -> None:
    """Write an error message to the file from which torchrun reports failed ranks.

    torch's own `record` decorator does so for uncaught exceptions.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        error = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": error}))


def is_first_rank() -> bool:
    """Whether this process prints for all ranks: rank 0, or a process without torchrun."""
    return not under_torchrun() or own_rank() == "0"


def own_rank() -> str:
    """Return RANK as the launcher set it, as text: it may be malformed."""
    return os.environ["RANK"]


@contextlib.contextmanager
def torchrun_world(device: str = "auto", backend: str | None = "auto", timeout_s: float = 1800.0) -> Iterator["World"]:
    """Context manager for the world of a rank that torchrun started; its exit waits for all ranks.

    device, backend: as for `RankServer.start`. timeout_s: of each operation, in seconds.
    Raises UserError if the rank is unknown, the port is taken or the device is not available.
    """
    # Imported here, so that `under_torchrun` does not import torch.
    import torch
    import torch.distributed as dist

    from minidist.comm.world import World
    from minidist.tools.deadlock.status_page import StatusPage
    from minidist.tools.deadlock.watchdog import Watchdog
    from minidist.tools.launch.device import choose_backend, choose_device, init_group, prefer_loopback

    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())  # torchrun's ranks would outlive it
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
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # separates the statuses of restarts
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
    """Return torch's rendezvous store: the agent's under torchrun, else one that rank 0 serves."""
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
    """Return the environment without the OMP_NUM_THREADS=1 that torchrun adds if the user set none.

    The user's own value is read from torchrun's environment in /proc, on Linux.
    """
    environ = dict(os.environ)
    with contextlib.suppress(OSError):
        launcher = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        if "TORCHELASTIC_RUN_ID" in environ and not any(entry.startswith(b"OMP_NUM_THREADS=") for entry in launcher):
            environ.pop("OMP_NUM_THREADS", None)
    return environ
