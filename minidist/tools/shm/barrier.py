"""The barrier of a group: every rank sends a message to every other rank and receives one from each.

Each operation begins with a barrier whose messages carry the operation's signature: its name, dtype and size as text.
If the signatures differ, every rank reports which rank does which operation, before any data is touched. The barrier
also notices that a rank has ended or left the group.
"""

import contextlib
import socket
import time
from collections.abc import Sequence

import torch.distributed as dist

from minidist.tools.shm.process_context import ProcessContext, receive_message, set_socket_timeout

EAGER_MESSAGE_BYTES = 1 << 16
_MESSAGE_BYTES = 1 << 12
_CHECK_GONE_S = 0.1  # how often a blocked receive checks whether a rank that it needs has left
_ABORTED = b"!"  # first byte of the last message of a rank that aborts
_PLAIN = b"."


class ShmError(dist.DistBackendError):
    """An operation of the torch.distributed backend `shm` failed, on this rank or on another rank of the group."""


class GroupBarrier:
    """Exchanges messages with all other ranks of one process group over sockets. Every exchange is a barrier.

    context: the `ProcessContext` of this process. ranks: the global rank of each group rank. rank: this rank's group
    rank. socks: the connected socket to each group rank, None for this rank. name: the group's name in error messages.
    timeout_s: how long an operation waits for another rank.
    failure: why the group can run no more operations, None while it can. departure_reasons: for each group rank that
    has left the group or ended, a text such as "rank 1 has ended".
    """

    def __init__(self, context: ProcessContext, ranks: Sequence[int], rank: int, socks, name: str, timeout_s: float):
        self.ranks, self.rank, self.size, self.name = tuple(ranks), rank, len(ranks), name
        self.timeout_s = timeout_s
        self.count = 0  # operations begun
        self.failure: str | None = None
        self._context, self._socks = context, list(socks)
        self.peers = [(i, sock) for i, sock in enumerate(socks) if sock is not None]
        self.departure_reasons: dict[int, str] = {}
        self._awaited: set[int] = set()  # ranks whose message the running `exchange` still waits for
        self.set_timeout(timeout_s)

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks)) if self.size <= 8 else f"{self.ranks[0]} ... {self.ranks[-1]}"
        return f"group '{self.name}' (ranks {ranks})"

    def set_timeout(self, seconds: float) -> None:
        """Set how many seconds an operation of this group waits for another rank before it raises ShmError."""
        self.timeout_s = seconds
        for _, sock in self.peers:
            set_socket_timeout(sock, seconds, receive_s=min(seconds, _CHECK_GONE_S))

    # -- exchange of messages -----------------------------------------------------------------------------------------

    def begin_operation(self, signature: str, shape: str = "", payload: bytes = b"") -> list[bytes]:
        """Wait until all ranks have begun the same operation; return each rank's `payload`, by group rank. Collective.

        signature: operation, dtype and size as text, such as "all_reduce sum float32 6"; must be equal on all ranks.
        shape: the shape of this rank's tensor as text, for the error message only.
        Raises ShmError if the signatures differ, if another rank aborts, leaves the group or ends, or after the
        timeout.
        """
        own_signature = f"{self.count} {signature}".encode()
        whole = b"\0".join([own_signature, shape.encode(), payload])
        messages = self.exchange(whole)
        if messages.count(whole) == self.size:
            return [payload] * self.size
        parts = [message.split(b"\0", 2) for message in messages]
        for other, part in enumerate(parts):
            if part[0] != own_signature:
                self.failure = self._describe_mismatch(parts, other)  # every rank detects it, so no message is needed
                raise ShmError(self.failure)
        return [part[2] for part in parts]

    def exchange(self, message: bytes = b"") -> list[bytes]:
        """Send `message` to every other rank; return the messages of all ranks, by group rank. Collective.

        This is a barrier: when it returns, all ranks have called it. Raises ShmError if another rank aborts, leaves the
        group or ends, or does not call this method within the timeout.
        """
        if self.failure:
            raise ShmError(self.failure)
        try:
            payload = _PLAIN + message
            for _, sock in self.peers:
                # A peer that has gone cannot take the message, but its own last one may still be queued.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    sock.send(payload)
            received = [message] * self.size
            self._awaited = {other for other, _ in self.peers}
            for other, sock in self.peers:
                received[other] = self._receive(other, sock)
                self._awaited.discard(other)
            return received
        except BaseException as error:
            # The operation cannot complete on any rank: tell the others why instead of leaving them to wait.
            self.abort(str(error) if isinstance(error, ShmError) else f"{type(error).__name__} {error}".strip())
            raise

    def _receive(self, other: int, sock: socket.socket) -> bytes:
        """Wait for the next message of rank `other`. Raises ShmError when a message of this operation cannot come."""
        start_s = time.monotonic()
        while True:
            try:
                received = receive_message(sock, _MESSAGE_BYTES)
                break
            except BlockingIOError:
                if time.monotonic() - start_s >= self.timeout_s:
                    text = f"rank {self.ranks[other]} did not come to operation {self.count} of {self} in time"
                    raise ShmError(text) from None
                self._check_awaited()
            except ConnectionResetError:
                received = receive_after_connection_reset(sock)
                break
        return self._unpack_message(other, received)

    def _unpack_message(self, other: int, received: bytes) -> bytes:
        """Return the content of a message from rank `other`. Raises ShmError if it has aborted or left."""
        if received[:1] == _PLAIN:
            return received[1:]
        if received:
            raise ShmError(f"rank {self.ranks[other]} aborted: {received[1:].decode(errors='replace')}")
        why = "; ".join(
            self.departure_reasons.values()
        )  # in order of leaving: the first is the cause, others may have followed
        raise ShmError(why or f"rank {self.ranks[other]} has left {self} or ended")

    def _check_awaited(self) -> None:
        """Raise ShmError if a rank has aborted, or has gone without sending its message for this operation.

        A rank that left after sending it does not matter: the messages of the remaining ranks can still arrive.
        """
        for other in sorted(self._awaited):
            sock = self._socks[other]
            with contextlib.suppress(BlockingIOError):  # nothing has come yet
                try:
                    first = sock.recv(_MESSAGE_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
                except ConnectionResetError:
                    first = receive_after_connection_reset(sock, socket.MSG_PEEK)
                self._unpack_message(other, first)

    def monitored_barrier(self, timeout_s: float, all_missing: bool) -> None:
        """Block until all ranks have called this method; after `timeout_s` raise ShmError, which names late ranks.

        Collective. all_missing: name all late ranks, not only the first. Rank 0 measures the time. The error is raised
        on rank 0 and on the ranks that have called in time.
        """
        signature = _PLAIN + f"{self.count} monitored_barrier".encode()
        if self.rank:
            first = self.peers[0][1]
            first.send(signature)
            self._receive(0, first)
            return
        missing = []
        end_s = time.monotonic() + timeout_s
        for other, sock in self.peers:
            set_socket_timeout(sock, max(1e-3, end_s - time.monotonic()))
            try:
                if receive_message(sock, _MESSAGE_BYTES)[:1] != _PLAIN:
                    missing.append(self.ranks[other])
            except OSError:
                missing.append(self.ranks[other])
            if missing and not all_missing:
                break
        self.set_timeout(self.timeout_s)
        if missing:
            names = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}"
            self.abort(f"{names} failed to pass monitored_barrier in {1000 * timeout_s:g} ms")
            raise ShmError(self.failure)
        for _, sock in self.peers:
            sock.send(signature)

    def _describe_mismatch(self, parts: list[list[bytes]], other: int) -> str:
        """Return the error message about ranks that have begun different operations.

        parts: (signature, shape, ...) of every rank. other: a group rank whose signature differs from this rank's.
        """
        ranks_by_operation: dict[str, list[int]] = {}
        for rank, part in enumerate(parts):
            number, _, what = part[0].decode(errors="replace").partition(" ")
            shape = part[1].decode(errors="replace") if len(part) > 1 else ""
            ranks_by_operation.setdefault(f"operation {number}: {what} {shape}".rstrip(), []).append(self.ranks[rank])
        doing = [
            f"rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}: {words}" for words, r in ranks_by_operation.items()
        ]
        return (
            f"ranks {self.ranks[self.rank]} and {self.ranks[other]} of {self} do not do the same: {'; '.join(doing)}\n"
            "all ranks of a group must launch the same operations, of the same size and dtype, in one order"
        )

    # -- the end ------------------------------------------------------------------------------------------------------

    def mark_departed(self, other: int, reason: str) -> None:
        """Record that group rank `other` has left the group or ended: operations that `other` has not begun now fail.

        Messages that `other` has sent before are still received. reason: the text of the ShmError.
        """
        if other not in self.departure_reasons:
            self.departure_reasons[other] = reason
            with contextlib.suppress(OSError):
                self._socks[other].shutdown(socket.SHUT_RDWR)

    def abort(self, reason: str) -> None:
        """Make all later operations of this group fail on all ranks. reason: the text of their ShmError.

        Other ranks that wait for this rank fail at once. Does nothing if the group has failed before.
        """
        if self.failure is None:
            self.failure = reason
            for _, sock in self.peers:
                with contextlib.suppress(OSError):
                    sock.send(_ABORTED + reason.encode()[:1000], socket.MSG_DONTWAIT)

    def interrupt_operations(self) -> None:
        """Make this rank's running and later operations of the group fail, because this rank destroys the group."""
        self.failure = self.failure or "the group was destroyed"
        for _, sock in self.peers:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RD)


def receive_after_connection_reset(sock: socket.socket, flags: int = 0) -> bytes:
    """Return the next message that the peer sent before it closed the connection; b"" if there is none.

    Call this after `sock.recv` has raised ConnectionResetError: the peer closed without reading every message sent to
    it, but messages from the peer may still be queued. flags: passed to `sock.recv`.
    """
    try:
        return sock.recv(EAGER_MESSAGE_BYTES, flags)
    except OSError:
        return b""
