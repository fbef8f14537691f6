"""The barrier of a group: every rank sends a message to every other rank and receives one from each.

Each operation begins with a barrier whose messages carry the operation's signature. So a mismatch between ranks is
reported on all of them, with who does what, before any data is touched; and a rank that has gone is noticed there.
"""

import contextlib
import socket
import time
from collections.abc import Sequence

import torch.distributed as dist

from minidist.tools.shm.process_context import ProcessContext, receive_message, set_socket_timeout

EAGER_MESSAGE_BYTES = 1 << 16
_MESSAGE_BYTES = 1 << 12
_LOOK_S = 1.0  # how often a blocked receive checks whether a rank that it needs has left
_ABORTED = b"!"  # first byte of the last message of a rank that aborts
_PLAIN = b"."


class ShmError(dist.DistBackendError):
    """An operation of the backend `shm` failed."""


class GroupBarrier:
    """This rank's connections to the other ranks of a group, and the message exchange over them.

    ranks: global rank of each group rank; rank: this group rank; socks: connections by group rank, None for this one.
    failure: why no operation is possible any more, None while the group works. gone: reasons by group rank.
    """

    def __init__(self, context: ProcessContext, ranks: Sequence[int], rank: int, socks, name: str, timeout_s: float):
        self.ranks, self.rank, self.size, self.name = tuple(ranks), rank, len(ranks), name
        self.timeout_s = timeout_s
        self.count = 0  # operations begun
        self.failure: str | None = None
        self._context, self._socks = context, list(socks)
        self.peers = [(i, sock) for i, sock in enumerate(socks) if sock is not None]
        self.gone: dict[int, str] = {}
        self._awaited: set[int] = set()  # ranks whose message the running `exchange` still waits for
        self.set_timeout(timeout_s)

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks)) if self.size <= 8 else f"{self.ranks[0]} ... {self.ranks[-1]}"
        return f"group '{self.name}' (ranks {ranks})"

    def set_timeout(self, seconds: float) -> None:
        """Set how long one operation may wait for a rank. Receives wake more often, to notice ranks that left."""
        self.timeout_s = seconds
        for _, sock in self.peers:
            set_socket_timeout(sock, seconds, receive_s=min(seconds, _LOOK_S))

    # -- exchange of messages -----------------------------------------------------------------------------------------

    def begin(self, signature: str, shape: str = "", extra: bytes = b"") -> list[bytes]:
        """Begin an operation: wait until all ranks have begun the same one, and return the `extra` of every rank.

        signature: what must be equal on all ranks; shape: for the error message only. Raises ShmError on a mismatch.
        """
        mine = f"{self.count} {signature}".encode()
        whole = b"\0".join([mine, shape.encode(), extra])
        messages = self.exchange(whole)
        if messages.count(whole) == self.size:
            return [extra] * self.size
        parts = [message.split(b"\0", 2) for message in messages]
        for other, part in enumerate(parts):
            if part[0] != mine:
                self.failure = self._mismatch(parts, other)  # every rank detects it, so no message is needed
                raise ShmError(self.failure)
        return [part[2] for part in parts]

    def exchange(self, message: bytes = b"") -> list[bytes]:
        """Send `message` to every other rank; return the messages of all ranks, by group rank.

        A barrier: when it returns, all ranks have called it. Raises ShmError when a rank has aborted, left or ended.
        """
        if self.failure:
            raise ShmError(self.failure)
        try:
            said = _PLAIN + message
            for _, sock in self.peers:
                # A peer that has gone cannot take the message, but its own last one may still be queued.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    sock.send(said)
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
        begun_s = time.monotonic()
        while True:
            try:
                received = receive_message(sock, _MESSAGE_BYTES)
                break
            except BlockingIOError:
                if time.monotonic() - begun_s >= self.timeout_s:
                    text = f"rank {self.ranks[other]} did not come to operation {self.count} of {self} in time"
                    raise ShmError(text) from None
                self._check_awaited()
            except ConnectionResetError:
                received = receive_after_reset(sock)
                break
        return self._read(other, received)

    def _read(self, other: int, received: bytes) -> bytes:
        if received[:1] == _PLAIN:
            return received[1:]
        if received:
            raise ShmError(f"rank {self.ranks[other]} aborted: {received[1:].decode(errors='replace')}")
        why = "; ".join(self.gone.values())  # in order of leaving: the first is the cause, others may have followed
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
                    first = receive_after_reset(sock, socket.MSG_PEEK)
                self._read(other, first)

    def monitored_barrier(self, timeout_s: float, all_missing: bool) -> None:
        """A barrier that names the ranks that are late: the first one, or all of them. Only rank 0 has the time limit.

        Raises ShmError on rank 0 and on the ranks that were in time.
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

    def _mismatch(self, parts: list[list[bytes]], other: int) -> str:
        by_words: dict[str, list[int]] = {}
        for rank, part in enumerate(parts):
            number, _, what = part[0].decode(errors="replace").partition(" ")
            shape = part[1].decode(errors="replace") if len(part) > 1 else ""
            by_words.setdefault(f"operation {number}: {what} {shape}".rstrip(), []).append(self.ranks[rank])
        doing = [f"rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}: {words}" for words, r in by_words.items()]
        return (
            f"ranks {self.ranks[self.rank]} and {self.ranks[other]} of {self} do not do the same: {'; '.join(doing)}\n"
            "all ranks of a group must launch the same operations, of the same size and dtype, in one order"
        )

    # -- the end ------------------------------------------------------------------------------------------------------

    def mark_gone(self, other: int, why: str) -> None:
        """Record that rank `other` has gone. Its messages are still received; operations that it has not begun fail."""
        if other not in self.gone:
            self.gone[other] = why
            with contextlib.suppress(OSError):
                self._socks[other].shutdown(socket.SHUT_RDWR)

    def abort(self, why: str) -> None:
        """Make all further operations of this group fail, here and on the other ranks."""
        if self.failure is None:
            self.failure = why
            for _, sock in self.peers:
                with contextlib.suppress(OSError):
                    sock.send(_ABORTED + why.encode()[:1000], socket.MSG_DONTWAIT)

    def interrupt(self) -> None:
        """Make the operation of this process that waits here fail: the group is being destroyed."""
        self.failure = self.failure or "the group was destroyed"
        for _, sock in self.peers:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RD)


def receive_after_reset(sock: socket.socket, flags: int = 0) -> bytes:
    """Receive from a connection after ECONNRESET: the peer closed without reading everything that it was sent.

    Returns the message that the peer sent before it closed, b"" for none.
    """
    try:
        return sock.recv(EAGER_MESSAGE_BYTES, flags)
    except OSError:
        return b""
