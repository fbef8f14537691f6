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
        for _, sock in self.others:
            patience(sock, timeout_s)

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks)) if self.size <= 8 else f"{self.ranks[0]} ... {self.ranks[-1]}"
        return f"group '{self.name}' (ranks {ranks})"

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
            for other, sock in self.others:
                heard[other] = self._hear(other, sock)
            return heard
        except BaseException as error:
            # This rank cannot go on, so none can: tell them why instead of leaving them to wait.
            self.break_off(str(error) if isinstance(error, ShmError) else f"{type(error).__name__} {error}".strip())
            raise

    def _hear(self, other: int, sock: socket.socket) -> bytes:
        try:
            heard = receive(sock, _MESSAGE_BYTES)
        except OSError as error:
            heard = self._late(other, sock, error)
        if heard[:1] == _PLAIN:
            return heard[1:]
        if heard:
            raise ShmError(f"rank {self.ranks[other]} gave up: {heard[1:].decode(errors='replace')}")
        why = "; ".join(self.gone.values())  # in the order of going: the first is the reason, others may have followed
        raise ShmError(why or f"rank {self.ranks[other]} has left {self} or ended")

    def _late(self, other: int, sock: socket.socket, error: OSError) -> bytes:
        return after(error, sock, f"rank {self.ranks[other]} did not come to operation {self.count} of {self}")

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
                self._hear(other, sock)
            except ShmError:
                missing.append(self.ranks[other])
            finally:
                patience(sock, self.timeout_s)
            if missing and not all_missing:
                break
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
        """Rank `other` is gone. What it has said is still heard; after a moment nobody can be waiting for good."""
        if other not in self.gone:
            self.gone[other] = why
            with contextlib.suppress(OSError):
                self._socks[other].shutdown(socket.SHUT_RDWR)
            self._here.later(self._hang_up)

    def break_off(self, why: str) -> None:
        """No operation of this group can be done any more: say so here and to the others."""
        if self.broken is None:
            self.broken = why
            for _, sock in self.others:
                with contextlib.suppress(OSError):
                    sock.send(_GAVE_UP + why.encode()[:1000], socket.MSG_DONTWAIT)

    def _hang_up(self) -> None:
        for _, sock in self.others:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RD)

    def cut(self) -> None:
        """Wake whoever of this process waits here."""
        self.broken = self.broken or "the group was destroyed"
        self._hang_up()


def after(error: OSError, sock: socket.socket, late: str) -> bytes:
    """What a failed `recv` stands for: the next message after all, b"" for none. Raises ShmError when it is late."""
    if isinstance(error, BlockingIOError):
        raise ShmError(f"{late} in time") from None
    if not isinstance(error, ConnectionResetError):
        raise error
    try:  # the other has closed without reading all; what it had said comes now
        return sock.recv(EAGER_MESSAGE_BYTES)
    except OSError:
        return b""
