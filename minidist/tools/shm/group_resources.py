"""The connections, queues and shared memory of one group, and how they are released."""

import contextlib
import time
from collections.abc import Callable

from minidist.tools.shm.barrier import GroupBarrier, ShmError
from minidist.tools.shm.collectives import Collectives
from minidist.tools.shm.operation_queue import OperationQueue
from minidist.tools.shm.process_context import ProcessContext, WatchedProcess
from minidist.tools.shm.transfer import Transfers

_LINGER_S = 2.0  # how long operations in flight may take to end when the group is destroyed
_STEP_S = 0.002


class GroupResources:
    """The connections, operation queues and shared memory of one process group on this rank; `close` releases them.

    context: the `ProcessContext` of this process. barrier: the connections to the other ranks. tokens:
    `ProcessContext.token` of each group rank. pids: process id of each group rank. name: a unique name that all ranks
    of the group know. on_close: called once the group is closed, with True if it was the last group of this process.

    queue: the `OperationQueue` of the collectives. Sends and receives have one queue per (direction, peer, tag).
    """

    def __init__(
        self,
        context: ProcessContext,
        barrier: GroupBarrier,
        tokens: list[str],
        pids: list[int | None],
        name: str,
        on_close,
    ):
        self.barrier, self.workers = barrier, context.workers
        self.rank, self.size = barrier.rank, barrier.size
        self._context, self._on_close, self._open = context, on_close, True
        self.queue = OperationQueue(context.workers)
        self.collectives = Collectives(context, barrier, [context.get_arena(token) for token in tokens])
        self.transfers = Transfers(context, barrier, tokens, name)
        self._transfer_queues: dict[tuple[str, int, int], OperationQueue] = {}
        self._processes: list[WatchedProcess | None] = []
        context.add_group_reference()
        for other, sock in barrier.peers:
            context.watch_socket(sock, lambda other=other: self._on_hangup(other, "has left"))
            self._processes.append(
                context.watch_process(pids[other], lambda other=other: self._on_hangup(other, "has ended"))
            )

    def run_collective(self, call: Callable[[], None]) -> None:
        """Run one collective, the function `call`, in the calling thread; raise its error if it fails.

        After such an error the group is unusable on all ranks, because they are no longer at the same operation: later
        calls raise ShmError.
        """
        self.barrier.count += 1
        if self.barrier.failure:
            raise ShmError(self.barrier.failure)
        try:
            call()
        except BaseException as error:
            self.barrier.abort(str(error) or type(error).__name__)
            raise

    def get_transfer_queue(self, direction: str, peer: int, tag: int) -> OperationQueue:
        """Return the queue of this rank's sends to, or receives from, group rank `peer` with this tag.

        direction: "send" or "recv". The first call creates the queue. Raises ValueError if `peer` is this rank or is
        not in the group.
        """
        if not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(f"{direction}: rank {self.rank} of {self.barrier} has no peer {peer}")
        return self._transfer_queues.setdefault((direction, peer, tag), OperationQueue(self.workers))

    def check_not_destroyed(self) -> None:
        """Raise ShmError if this process group has been destroyed on this rank."""
        if not self._open:
            raise ShmError(f"{self.barrier} was destroyed")

    def set_timeout(self, seconds: float) -> None:
        """Set how many seconds an operation of the group waits for another rank before it raises ShmError."""
        self.barrier.set_timeout(seconds)

    def disconnect_peers(self) -> None:
        """Make operations that wait for another rank fail, as if all other ranks had left the group.

        May be called from any thread.
        """
        for other, _ in self.barrier.peers:
            self._on_hangup(other, "has left")

    def _on_hangup(self, other: int, how: str) -> None:
        """Make operations that need rank `other` fail. how: "has left" (the group) or "has ended"."""
        name = f"rank {self.barrier.ranks[other]}"
        self.barrier.mark_departed(
            other, f"{name} has left {self.barrier}" if how == "has left" else f"{name} has ended"
        )
        self.transfers.disconnect_peer(other)

    def close(self, patience_s: float = _LINGER_S) -> None:
        """Leave the process group on this rank and release its resources. Does nothing if the group is closed already.

        patience_s: how many seconds operations in flight may take to end; after that they fail with ShmError.
        """
        if not self._open:
            return
        self._open = False
        queues = [self.queue, *self._transfer_queues.values()]
        self._wait_until_idle(queues, patience_s)
        gone = ShmError(f"{self.barrier} was destroyed before this was done")
        for queue in queues:
            queue.fail_pending_operations(gone)
        for _, sock in self.barrier.peers:
            with contextlib.suppress(OSError):
                self._context.unwatch_socket(sock.fileno())
        for process in self._processes:
            self._context.unwatch_process(process)
        self.barrier.interrupt_operations()
        self.transfers.fail_all()
        self._wait_until_idle(queues, _LINGER_S)
        self.transfers.close_sockets()
        self._context.retire_group([sock for _, sock in self.barrier.peers], self.collectives.leased_blocks)
        self._on_close(self._context.drop_group_reference())

    def _wait_until_idle(self, queues: list[OperationQueue], seconds: float) -> None:
        """Wait until no operation is queued or running in `queues`, at most `seconds`."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and not all(queue.is_idle for queue in queues):
            time.sleep(_STEP_S)
