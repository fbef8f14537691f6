"""Send and receive: a connection per (peer, direction, tag), made by the sender at the first send.

A send ends when it is matched, as gloo's and nccl's do, so a program that deadlocks there deadlocks here. What is small
lies in the first message. Of a larger tensor the first message tells the size; when the receiver is there it says so,
and only then does the sender borrow memory for two pieces, of which one is filled while the other is read. So memory is
held by transfers that go on, never by one that waits for its receiver.
"""

import contextlib
import json
import socket
import struct

from torch import Tensor

from minidist.tools.shm.neighbours import Neighbours, patience, receive
from minidist.tools.shm.rendezvous import EAGER_MESSAGE_BYTES, Meeting, ShmError, receive_rest
from minidist.tools.shm.sizes import EAGER_BYTES, PIECE_BYTES

_PIECE = struct.Struct("<QQ")
_GO, _NO = b"+", b"!"


class Transfers:
    """The channels of one group.

    tokens: of the ranks' processes; name: what the group is called between them.
    """

    def __init__(self, here: Neighbours, meeting: Meeting, tokens: list[str], name: str):
        self._here, self._meeting, self._tokens, self._name = here, meeting, tokens, name
        self._socks: dict[tuple[str, int, int], socket.socket] = {}
        self._memories = [here.memory(token) for token in tokens]
        self._closed = False

    def send(self, flat: Tensor, told: str, peer: int, tag: int) -> None:
        """Send the bytes `flat` (n,) to group rank `peer`. told: dtype and shape."""
        sock = self._channel("send", peer, tag)
        small = flat.numel() <= EAGER_BYTES
        head = json.dumps([flat.numel(), told.split(" ")[0], told]).encode() + b"\n"
        what = f"send of {told} to rank {self._meeting.ranks[peer]} (tag {tag})"
        self._say(sock, head + (flat.numpy().tobytes() if small else b""))
        answer = self._hear(sock, peer, what)
        if answer[:1] == _NO:
            raise ShmError(answer[1:].decode())
        if not small:
            self._stream(flat, sock, peer, what)

    def _stream(self, flat: Tensor, sock: socket.socket, peer: int, what: str) -> None:
        arena, size = self._here.arena, min(flat.numel(), PIECE_BYTES)
        place = arena.borrow(2 * size)
        try:
            unread = 0
            for i, begin in enumerate(range(0, flat.numel(), size)):
                if unread == 2:
                    self._hear(sock, peer, what)
                    unread -= 1
                piece, at = flat[begin : begin + size], place + i % 2 * size
                arena.memory[at : at + piece.numel()].copy_(piece)
                self._say(sock, _PIECE.pack(at, piece.numel()))
                unread += 1
            for _ in range(unread):
                self._hear(sock, peer, what)
        finally:
            arena.give_back(place, 2 * size)

    def recv(self, flat: Tensor, told: str, peer: int, tag: int) -> None:
        """Fill the bytes `flat` (n,) with what group rank `peer` sends."""
        sock = self._channel("recv", peer, tag)
        what = f"recv of {told} from rank {self._meeting.ranks[peer]} (tag {tag})"
        head, _, data = self._hear(sock, peer, what).partition(b"\n")
        size, dtype, theirs = json.loads(head)
        if [size, dtype] != [flat.numel(), told.split(" ")[0]]:
            mine, other = self._meeting.ranks[self._meeting.rank], self._meeting.ranks[peer]
            text = (
                f"rank {other} sends {theirs} to rank {mine}, which receives {told}: they must agree in number of "
                f"elements and dtype (tag {tag} of {self._meeting})"
            )
            self._say(sock, _NO + text.encode())
            raise ShmError(text)
        if size <= EAGER_BYTES:
            flat.numpy()[:] = memoryview(data)
            self._say(sock, _GO)
            return
        self._say(sock, _GO)
        memory, begin = self._memories[peer], 0
        while begin < size:
            at, length = _PIECE.unpack(self._hear(sock, peer, what))
            flat[begin : begin + length].copy_(memory[at : at + length])
            self._say(sock, _GO)
            begin += length

    def _channel(self, direction: str, peer: int, tag: int) -> socket.socket:
        key = (direction, peer, tag)
        if key not in self._socks:
            if direction == "send":
                self._refuse_lost(peer)
                try:
                    sock, _ = self._here.connect(self._tokens[peer], (self._name, "tag", self._meeting.rank, tag))
                except OSError as error:
                    raise ShmError(f"{self._why(peer)}: no connection ({error})") from None
            else:
                name = (self._name, "tag", peer, tag)
                arrived = self._here.arrival(name, lambda: self._may_come(peer), self._meeting.timeout_s)
                if arrived is None:
                    self._refuse_lost(peer)
                    raise ShmError(
                        f"rank {self._meeting.ranks[peer]} did not send under tag {tag} of {self._meeting} in time"
                    )
                sock = arrived[0]
            patience(sock, self._meeting.timeout_s)
            self._socks[key] = sock
            # It may have left while we connected, when `lose` knew nothing of this connection.
            self._refuse_lost(peer)
        return self._socks[key]

    def _may_come(self, peer: int) -> bool:
        return not self._closed and peer not in self._meeting.gone

    def _refuse_lost(self, peer: int) -> None:
        if not self._may_come(peer):
            raise ShmError(self._why(peer))

    def _why(self, peer: int) -> str:
        if self._closed:
            return "the group was destroyed"
        return self._meeting.gone.get(peer) or f"rank {self._meeting.ranks[peer]} has left {self._meeting} or ended"

    def _say(self, sock: socket.socket, message: bytes) -> None:
        # When the other is gone, the message that is waited for next will not come, and that says so.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.send(message)

    def _hear(self, sock: socket.socket, peer: int, what: str) -> bytes:
        try:
            heard = receive(sock, EAGER_MESSAGE_BYTES)
        except BlockingIOError:
            raise ShmError(
                f"{what} of {self._meeting}: rank {self._meeting.ranks[peer]} did not come in time"
            ) from None
        except ConnectionResetError:
            heard = receive_rest(sock)
        if not heard:
            raise ShmError(f"{self._why(peer)} ({what})")
        return heard

    def lose(self, peer: int) -> None:
        """The peer is gone: who waits for it hears what it had said, and then that."""
        for (_, other, _), sock in list(self._socks.items()):
            if other == peer:
                _shut(sock)
        with self._here.changed:
            self._here.changed.notify_all()

    def close(self) -> None:
        self._closed = True
        for sock in self._socks.values():
            _shut(sock)
        with self._here.changed:
            self._here.changed.notify_all()

    def drop(self) -> None:
        """Close the connections, when nobody of this process uses them any more."""
        for sock in self._socks.values():
            sock.close()
        self._socks.clear()


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
