"""Where the ranks of a group meet: a connection between any two, and a message from each to each.

A meeting is the group's barrier, its check that all ranks do the same thing, and how it learns that one is gone. Every
operation begins with one in which each rank says what it does; so a mismatch is told to all, by name, before any data
is touched.
"""

import contextlib
import socket
import time
from collections.abc import Sequence

import torch.distributed as dist

from minidist.tools.shm.neighbours import Neighbours, patience, receive

EAGER_MESSAGE_BYTES = 1 << 16
_MESSAGE_BYTES = 1 << 12
_LOOK_S = 1.0  # how often a blocked receive looks whether a rank that it needs has left
_GAVE_UP = b"!"  # first byte of a rank's last message
_PLAIN = b"."


class ShmError(dist.DistBackendError):
    """An operation of the backend `shm` cannot be done."""


class Meeting:
    """This rank's connections to the others of a group.

    ranks: global rank of each rank of the group; socks: by group rank, None for this one.
    """

    def __init__(self, here: Neighbours, ranks: Sequence[int], rank: int, socks, name: str, timeout_s: float):
        self.ranks, self.rank, self.size, self.name = tuple(ranks), rank, len(ranks), name
        self.timeout_s = timeout_s
        self.count = 0  # operations begun
        self.broken: str | None = None
        self._here, self._socks = here, list(socks)
        self.others = [(i, sock) for i, sock in enumerate(socks) if sock is not None]
        self.gone: dict[int, str] = {}
        self._unheard: set[int] = set()  # ranks whose message the running `meet` still waits for
        self.set_timeout(timeout_s)

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks)) if self.size <= 8 else f"{self.ranks[0]} ... {self.ranks[-1]}"
        return f"group '{self.name}' (ranks {ranks})"

    def set_timeout(self, seconds: float) -> None:
        """Set how long one operation may wait for a rank. A receive wakes earlier, to look for ranks that left."""
        self.timeout_s = seconds
        for _, sock in self.others:
            patience(sock, seconds, receive_s=min(seconds, _LOOK_S))

    # -- meeting ------------------------------------------------------------------------------------------------------

    def begin(self, told: str, shown: str = "", extra: bytes = b"") -> list[bytes]:
        """Start an operation: return every rank's `extra` when all have begun the same.

        told: what must be equal on all ranks; shown: the shape, for the message only. Raises ShmError.
        """
        mine = f"{self.count} {told}".encode()
        whole = b"\0".join([mine, shown.encode(), extra])
        messages = self.meet(whole)
        if messages.count(whole) == self.size:
            return [extra] * self.size
        parts = [message.split(b"\0", 2) for message in messages]
        for other, part in enumerate(parts):
            if part[0] != mine:
                self.broken = self._mismatch(parts, other)  # all ranks see it, nobody need be told
                raise ShmError(self.broken)
        return [part[2] for part in parts]

    def meet(self, message: bytes = b"") -> list[bytes]:
        """Give `message` to every other rank and take one from each: by group rank, this one's own among them.

        When it returns, all ranks have called it. Raises ShmError when one cannot come any more.
        """
        if self.broken:
            raise ShmError(self.broken)
        try:
            said = _PLAIN + message
            for _, sock in self.others:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # what it said last is still there
                    sock.send(said)
            heard = [message] * self.size
            self._unheard = {other for other, _ in self.others}
            for other, sock in self.others:
                heard[other] = self._hear(other, sock)
                self._unheard.discard(other)
            return heard
        except BaseException as error:
            # This rank cannot go on, so none can: tell them why instead of leaving them to wait.
            self.break_off(str(error) if isinstance(error, ShmError) else f"{type(error).__name__} {error}".strip())
            raise

    def _hear(self, other: int, sock: socket.socket) -> bytes:
        """Wait for the next message of rank `other`. Raises ShmError when a message of this operation cannot come."""
        begun_s = time.monotonic()
        while True:
            try:
                heard = receive(sock, _MESSAGE_BYTES)
                break
            except BlockingIOError:
                if time.monotonic() - begun_s >= self.timeout_s:
                    text = f"rank {self.ranks[other]} did not come to operation {self.count} of {self} in time"
                    raise ShmError(text) from None
                self._check_unheard()
            except ConnectionResetError:
                heard = receive_rest(sock)
                break
        return self._read(other, heard)

    def _read(self, other: int, heard: bytes) -> bytes:
        if heard[:1] == _PLAIN:
            return heard[1:]
        if heard:
            raise ShmError(f"rank {self.ranks[other]} gave up: {heard[1:].decode(errors='replace')}")
        why = "; ".join(self.gone.values())  # in the order of going: the first is the reason, others may have followed
        raise ShmError(why or f"rank {self.ranks[other]} has left {self} or ended")

    def _check_unheard(self) -> None:
        """Raise ShmError if a rank gave up, or went without sending its message for this operation.

        A rank that sent it and then left is no obstacle: the messages of the others still come, however late.
        """
        for other in sorted(self._unheard):
            sock = self._socks[other]
            with contextlib.suppress(BlockingIOError):  # nothing has come yet
                try:
                    first = sock.recv(_MESSAGE_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
                except ConnectionResetError:
                    first = receive_rest(sock, socket.MSG_PEEK)
                self._read(other, first)

    def monitored(self, timeout_s: float, all_missing: bool) -> None:
        """A barrier that names who did not come in time: the first such rank, or all. Only rank 0 looks.

        Raises ShmError on rank 0, and on those that did come.
        """
        told = _PLAIN + f"{self.count} monitored_barrier".encode()
        if self.rank:
            first = self.others[0][1]
            first.send(told)
            self._hear(0, first)
            return
        missing = []
        end_s = time.monotonic() + timeout_s
        for other, sock in self.others:
            patience(sock, max(1e-3, end_s - time.monotonic()))
            try:
                if receive(sock, _MESSAGE_BYTES)[:1] != _PLAIN:
                    missing.append(self.ranks[other])
            except OSError:
                missing.append(self.ranks[other])
            if missing and not all_missing:
                break
        self.set_timeout(self.timeout_s)
        if missing:
            names = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}"
            self.break_off(f"{names} failed to pass monitored_barrier in {1000 * timeout_s:g} ms")
            raise ShmError(self.broken)
        for _, sock in self.others:
            sock.send(told)

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

    def lose(self, other: int, why: str) -> None:
        """Rank `other` is gone. What it has sent is still received; operations that it has not begun fail."""
        if other not in self.gone:
            self.gone[other] = why
            with contextlib.suppress(OSError):
                self._socks[other].shutdown(socket.SHUT_RDWR)

    def break_off(self, why: str) -> None:
        """No operation of this group can be done any more: say so here and to the others."""
        if self.broken is None:
            self.broken = why
            for _, sock in self.others:
                with contextlib.suppress(OSError):
                    sock.send(_GAVE_UP + why.encode()[:1000], socket.MSG_DONTWAIT)

    def cut(self) -> None:
        """Wake whoever of this process waits here."""
        self.broken = self.broken or "the group was destroyed"
        for _, sock in self.others:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RD)


def receive_rest(sock: socket.socket, flags: int = 0) -> bytes:
    """The next message of a connection that the peer has reset, or b"": it closed without reading what we had sent,
    and what it had sent before comes now."""
    try:
        return sock.recv(EAGER_MESSAGE_BYTES, flags)
    except OSError:
        return b""
