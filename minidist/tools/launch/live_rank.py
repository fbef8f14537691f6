"""The rank's side of live ranks: receive requests, answer them, and recreate the process group after a failure."""

import os
import socket
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from minidist.comm.group import Group, GroupSpec, bind
from minidist.comm.meter import Meter
from minidist.comm.world import World
from minidist.mesh import AXES, Mesh
from minidist.tools.launch.protocol import receive_object, send_object
from minidist.tools.recording_backend import register_recording_backend

_LOOK_S = 0.5


class LiveRank:
    """A rank that stays alive between requests, and its connection to the client.

    meter: counts the traffic of this rank through any process group, raw `torch.distributed` calls included.
    """

    def __init__(self, world: World, control: socket.socket):
        self.world, self.meter = world, Meter()
        self._control = control
        self._abandoned: list[Any] = []
        self._backend = register_recording_backend(self.meter, world.status, use="world", wait=_wait)
        world.backend = self._backend

    def receive(self) -> Any:
        """Wait for the next request. Raises EOFError when the client is gone."""
        return receive_object(self._control)

    def answer(self, payload: Any) -> None:
        """Send the answer to the latest request."""
        send_object(self._control, ("answer", payload))

    def recreate_group(self, generation: int) -> Group:
        """Recreate the default process group; return a bound group over all ranks.

        generation: a new number for each call, the same on all ranks. Old groups with aborted operations are kept,
        because threads still wait in them.
        """
        world = self.world
        if dist.is_initialized():
            groups = list(dist.distributed_c10d._world.pg_map)
            self._abandoned.append(groups)
            dist.destroy_process_group()
        world.status.clear()
        dist.init_process_group(
            self._backend,
            store=dist.PrefixStore(f"live/{generation}", self.world.store),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(hours=12),
        )
        return bind(world, Mesh(dp=world.size), [GroupSpec("comm", AXES)], timeout_s=12 * 3600.0)["comm"]

    def close_connections(self) -> None:
        """Shut every connection of the process groups, so that waits inside torch, which hear no signal, end in an
        error. Call `recreate_group` next."""
        for fd in map(int, os.listdir("/dev/fd")):
            try:
                sock = socket.socket(fileno=fd)
            except OSError:  # not a socket, or closed meanwhile
                continue
            try:
                if sock.family in (socket.AF_INET, socket.AF_INET6):
                    ports = sock.getsockname()[1], sock.getpeername()[1]
                    if self.world.store.port not in ports:  # the store is needed again
                        sock.shutdown(socket.SHUT_RDWR)
            except OSError:  # it only listens
                pass
            finally:
                sock.detach()


def _wait(work: dist.Work, timeout: timedelta) -> bool:
    """Wait in a helper thread, so that a signal can interrupt it: torch's own wait handles none until it returns."""
    outcome: list[Any] = []
    done = threading.Event()

    def wait():
        try:
            outcome.append(work.wait(timeout) if timeout else work.wait())
        except BaseException as error:
            outcome.append(error)
        done.set()

    threading.Thread(target=wait, daemon=True).start()
    while not done.wait(_LOOK_S):
        pass
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]
