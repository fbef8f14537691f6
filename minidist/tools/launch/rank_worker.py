"""The rank's side of live ranks: answer requests, and recreate the process group after a failure."""

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from minidist.comm.group import Group, GroupSpec, bind
from minidist.comm.handles import wait_in_helper_thread
from minidist.comm.meter import Meter
from minidist.comm.world import World, connect_ranks
from minidist.mesh import AXES, Mesh
from minidist.tools.launch.protocol import receive_object, send_object
from minidist.tools.recording_backend import register_recording_backend
from minidist.tools.recovery.connections import shut_down_connections

_TIMEOUT_S = 12 * 3600.0  # of an operation in a cell


class RankWorker:
    """The rank's end of a `LiveJob`: receives the launcher's requests in a rank process that stays alive between them.

    world: this rank's world. control: the socket to the launcher. meter: counts the bytes that this rank sends through
    any process group, also by raw `torch.distributed` calls.
    """

    def __init__(self, world: World, control: socket.socket):
        self.world, self.meter = world, Meter()
        self._control = control
        self._abandoned: list[Any] = []
        self._backend = register_recording_backend(self.meter, world.status, group_name="world", wait_function=_wait)
        world.backend = self._backend

    def receive_request(self) -> Any:
        """Block until the launcher sends the next request; return it. Raises EOFError when the launcher has ended."""
        return receive_object(self._control)

    def send_answer(self, payload: Any) -> None:
        """Send the launcher the answer to the latest request, any picklable object."""
        send_object(self._control, ("answer", payload))

    def recreate_process_group(self, generation: int) -> Group:
        """Destroy torch's default process group and create a new one; return it as a `Group` of all ranks. Collective.

        generation: a number that is new in each call and equal on all ranks. Groups with aborted operations are kept in
        memory, because threads still wait in them.
        """
        world = self.world
        if dist.is_initialized():
            groups = list(dist.distributed_c10d._world.pg_map)
            self._abandoned.append(groups)
            dist.destroy_process_group()
        world.status.reset_channels()
        store = dist.PrefixStore(f"live/{generation}", world.store)
        connect_ranks(self._backend, store, world.rank, world.size, world.device, _TIMEOUT_S)
        return bind(world, Mesh(dp=world.size), [GroupSpec("comm", AXES)], timeout_s=_TIMEOUT_S)["comm"]

    def close_connections(self) -> None:
        """Close all connections of this rank's process groups, so that operations that wait in torch raise an error.

        Such waits ignore signals. Call `recreate_process_group` next.
        """
        port = self.world.store.port  # the store is needed again
        shut_down_connections(lambda sock: port in (sock.getsockname()[1], sock.getpeername()[1]))


def _wait(work: dist.Work, timeout: timedelta) -> bool:
    """Wait so that a signal can interrupt it."""
    return wait_in_helper_thread(lambda: work.wait(timeout) if timeout else work.wait())
